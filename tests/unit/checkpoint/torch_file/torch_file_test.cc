#include "lockstep/checkpoint/torch_file/torch_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/torch_file/zip_reader.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::message_of;
using tests::read_file;
using tests::TempDir;

const at::Tensor& tensor(const Value& tree, std::string_view name) {
  return *tree.as<Dict>()->find(name)->as<at::Tensor>();
}

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

TEST(TorchFile, RoundTripsValues) {
  const TempDir folder;
  Dict inner{{}, true};
  inner.add(0, "text \xc3\xa4");
  inner.add(-7, ByteString{std::string("\x00\xff\x80z", 4)});
  inner.add(None{}, Sequence{Sequence::Kind::kSet, {1, 2}});
  inner.add(2.5, None{});
  Dict outer;
  outer.add("inner", inner);
  outer.add("list", Sequence{Sequence::Kind::kList,
                             {true, false, 1.5, INT64_MIN, INT64_MAX, 255, 256, -1, std::int64_t{1} << 31}});
  outer.add("tuple", Sequence{Sequence::Kind::kTuple, {Sequence{Sequence::Kind::kTuple, {}}, Sequence{}, Dict{}}});
  save_torch_file(outer, folder / "x");
  const Value tree = load_torch_file(folder / "x");
  const Dict& dict = *tree.as<Dict>();
  EXPECT_FALSE(dict.ordered);
  const Dict& again = *dict.find("inner")->as<Dict>();
  EXPECT_TRUE(again.ordered);
  ASSERT_EQ(again.items.size(), 4u);
  EXPECT_EQ(*again.find(0)->as<std::string>(), "text \xc3\xa4");
  EXPECT_EQ(again.find(-7)->as<ByteString>()->bytes, std::string("\x00\xff\x80z", 4));
  EXPECT_EQ(again.items[2].value.as<Sequence>()->kind, Sequence::Kind::kSet);
  EXPECT_EQ(*again.items[3].key.as<double>(), 2.5);
  const auto& list = dict.find("list")->as<Sequence>()->items;
  ASSERT_EQ(list.size(), 9u);
  EXPECT_TRUE(*list[0].as<bool>());
  EXPECT_EQ(*list[3].as<std::int64_t>(), INT64_MIN);
  EXPECT_EQ(*list[4].as<std::int64_t>(), INT64_MAX);
  EXPECT_EQ(*list[8].as<std::int64_t>(), std::int64_t{1} << 31);
  EXPECT_EQ(dict.find("tuple")->as<Sequence>()->items.size(), 3u);
  EXPECT_EQ(dict.find("missing"), nullptr);
}

TEST(TorchFile, RoundTripsTensors) {
  const TempDir folder;
  const auto base = torch::arange(24.0).view({4, 6});
  Dict dict;
  dict.add("transposed", base.t());
  dict.add("base", base);
  dict.add("row", base.select(0, 1));
  dict.add("scalar", torch::tensor(3.5));
  dict.add("empty", torch::empty({0, 4}, torch::kInt8));
  dict.add("gaps", torch::arange(1000).slice(0, 0, 1000, 100));
  dict.add("expanded", torch::ones({1}).expand({5}));
  dict.add("conj", torch::tensor({c10::complex<float>(1, 2)}).conj());
  dict.add("wants", torch::ones({2}, torch::requires_grad()));
  const auto bucket = torch::arange(100.0);
  dict.add("left", bucket.slice(0, 0, 10));
  dict.add("right", bucket.slice(0, 50, 60));
  for (const auto type :
       {torch::kFloat64, torch::kFloat16, torch::kBFloat16, torch::kInt32, torch::kInt16, torch::kUInt8, torch::kBool,
        torch::kComplexDouble, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2, torch::kUInt16, torch::kUInt32,
        torch::kUInt64, at::ScalarType::ComplexHalf, at::ScalarType::Float8_e8m0fnu})
    dict.add(c10::toString(type), torch::ones({3}).to(type));
  save_torch_file(dict, folder / "x");
  const Value tree = load_torch_file(folder / "x");
  for (const auto& item : dict.items) {
    const at::Tensor& want = *item.value.as<at::Tensor>();
    const at::Tensor& got = tensor(tree, *item.key.as<std::string>());
    EXPECT_EQ(got.scalar_type(), want.scalar_type());
    EXPECT_EQ(got.sizes(), want.sizes());
    EXPECT_EQ(got.requires_grad(), want.requires_grad());
    EXPECT_EQ(bytes_of(got), bytes_of(want)) << *item.key.as<std::string>();
  }
  EXPECT_EQ(tensor(tree, "transposed").strides(), base.t().strides());
  EXPECT_TRUE(tensor(tree, "base").is_alias_of(tensor(tree, "transposed")));
  EXPECT_TRUE(tensor(tree, "base").is_alias_of(tensor(tree, "row")));
  EXPECT_FALSE(tensor(tree, "left").is_alias_of(tensor(tree, "right")))
      << "the values of other tensors in the bucket are not written";
  EXPECT_EQ(tensor(tree, "left").storage().nbytes(), 40u);
  EXPECT_EQ(tensor(tree, "gaps").storage().nbytes(), 80u);
  EXPECT_EQ(tensor(tree, "expanded").storage().nbytes(), 4u);
}

TEST(TorchFile, RejectsUnsupportedValues) {
  const TempDir folder;
  const auto path = folder.write("x", "before");
  const auto reason = [&](const Value& value) {
    return message_of<base::UsageError>([&] { save_torch_file(value, path); });
  };
  EXPECT_THAT(reason(at::Tensor()), HasSubstr("undefined"));
  EXPECT_THAT(reason(torch::ones({2, 2}).to_sparse()), HasSubstr("which is sparse"));
  EXPECT_THAT(reason(torch::ones({2}, torch::kMeta)), HasSubstr("which has no memory"));
  EXPECT_THAT(reason("\xff"), HasSubstr("expected UTF-8"));
  Dict duplicate, unhashable;
  duplicate.add("a", 1);
  duplicate.add("a", 2);
  unhashable.add(Sequence{}, 1);
  EXPECT_THAT(reason(duplicate), HasSubstr("has the key \"a\" twice"));
  EXPECT_THAT(reason(unhashable), HasSubstr("whose key is a list"));
  Value deep;
  for (int i = 0; i < 70; ++i) deep = Sequence{Sequence::Kind::kList, {deep}};
  EXPECT_THAT(reason(deep), HasSubstr("deeper than the limit of 64 levels"));
  EXPECT_EQ(read_file(path), "before");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(TorchFile, ErrorsNameDamagedStorages) {
  const TempDir folder;
  Dict dict{{}, true};
  dict.add("weight", torch::arange(40.0));
  dict.add("bias", torch::ones({3}));
  save_torch_file(dict, folder / "good");
  const std::string good = read_file(folder / "good");
  const auto path = folder / "x";
  for (std::size_t cut = 0; cut < good.size(); ++cut) {
    folder.write("x", good.substr(0, cut));
    EXPECT_THROW(load_torch_file(path), base::Error) << cut;
  }
  const auto records = ZipReader(folder / "good").records();
  std::size_t num_loaded = 0;
  const base::Fd file(::open(folder.write("x", good).c_str(), O_WRONLY | O_CLOEXEC));
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    const char flipped = static_cast<char>(good[bit / 8] ^ (1 << bit % 8));
    ASSERT_EQ(::pwrite(file.get(), &flipped, 1, static_cast<off_t>(bit / 8)), 1);
    std::string message;
    try {
      load_torch_file(path);
      ++num_loaded;  // for example a time stamp or padding
    } catch (const base::Error& error) {
      message = error.what();
    }
    ASSERT_EQ(::pwrite(file.get(), &good[bit / 8], 1, static_cast<off_t>(bit / 8)), 1);
    for (const auto& [name, record] : records) {
      if (bit / 8 < record.begin || bit / 8 >= record.begin + record.num_bytes || !name.ends_with("data/0")) continue;
      ASSERT_THAT(message, HasSubstr("storage \"0\" is damaged: the CRC-32 of its 160 bytes is ")) << bit;
    }
  }
  EXPECT_LT(num_loaded, good.size() * 8);
}

TEST(TorchFile, ReportsUnsupportedFileTypes) {
  const TempDir folder;
  EXPECT_THAT(
      message_of<base::UsageError>([&] { load_torch_file(folder.write("old", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9")); }),
      HasSubstr("before PyTorch 1.6"));
  EXPECT_THAT(message_of<base::FormatError>([&] { load_torch_file(folder.write("text", std::string(100, 'x'))); }),
              HasSubstr("expected the end of a zip archive here"));
  EXPECT_THROW(load_torch_file(folder / "missing"), base::SystemError);
  EXPECT_THROW(load_torch_file(folder.path()), base::UsageError);
}

TEST(TorchFile, FormatFollowsExtensionOnSaveAndContentOnLoad) {
  const TempDir folder;
  torch::nn::Sequential saved(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3)),
      loaded(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  save(saved, folder / "x.pt");
  save(saved, folder / "y.safetensors");
  EXPECT_TRUE(is_torch_file(folder / "x.pt"));
  EXPECT_FALSE(is_torch_file(folder / "y.safetensors"));
  EXPECT_FALSE(is_torch_file(folder.write("length", std::string("\x80\x02\0\0\0\0\0\0{}", 10))))
      << "the header of a safetensors file may have 640 bytes";
  std::filesystem::rename(folder / "x.pt", folder / "x");
  load(loaded, folder / "x");
  for (std::size_t i = 0; i < saved->parameters().size(); ++i)
    EXPECT_TRUE(saved->parameters()[i].equal(loaded->parameters()[i]));
  EXPECT_THAT(message_of<base::UsageError>([&] { save(saved, folder / "z.pth", {.metadata = {{"k", "v"}}}); }),
              HasSubstr("PyTorch files have no metadata"));
  torch::nn::Linear other(3, 3);
  EXPECT_THAT(message_of<base::UsageError>([&] { load(other, folder / "x"); }),
              HasSubstr("2 missing in the file (\"bias\", \"weight\"); 7 unexpected in the file"));
  Dict wrapped{{}, true}, all;
  for (const auto& item : saved->named_parameters()) wrapped.add("module." + item.key(), item.value().detach());
  for (const auto& item : saved->named_buffers()) wrapped.add("module." + item.key(), item.value());
  save_torch_file(wrapped, folder / "wrapped.pt");
  EXPECT_NO_THROW(load(loaded, folder / "wrapped.pt"));
  all.add("model", wrapped);
  save_torch_file(all, folder / "all.pt");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(loaded, folder / "all.pt"); }),
              HasSubstr("it contains a dictionary under the name \"model\"; expected a state_dict"));
  save_torch_file(Value(3), folder / "three.pt");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(loaded, folder / "three.pt"); }),
              HasSubstr("it contains an integer"));
}

}  // namespace
}  // namespace lockstep::checkpoint
