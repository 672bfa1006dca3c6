#include "lockstep/checkpoint/safetensors/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/limits.h"
#include "tests/support/sanitizer.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::message_of;
using tests::read_file;
using tests::TempDir;

bool identical(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0);
}

std::string little_endian(std::uint64_t value) { return {reinterpret_cast<const char*>(&value), 8}; }

TensorMap one_of_each_dtype() {
  torch::manual_seed(1);
  const auto values = torch::randn({3, 5}) * 50;
  TensorMap tensors;
  for (const auto type :
       {torch::kFloat64, torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kInt64, torch::kInt32,
        torch::kInt16, torch::kInt8, torch::kUInt8, torch::kBool, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2})
    tensors[c10::toString(type)] = values.to(type);
  for (const auto type : {torch::kUInt16, torch::kUInt32, torch::kUInt64})
    tensors[c10::toString(type)] = values.abs().to(type);
  return tensors;
}

TEST(Safetensors, RoundTripsEveryDtype) {
  const TempDir folder;
  auto tensors = one_of_each_dtype();
  tensors["nan"] = torch::tensor({std::nanf("1"), -0.0f, 1e-45f});
  tensors["scalar"] = torch::tensor(3.5);
  tensors["empty"] = torch::empty({0});
  tensors["empty too"] = torch::empty({4, 0, 2}, torch::kInt8);
  tensors[""] = torch::ones({2});
  tensors["\xc3\xa4\n\"\\"] = torch::ones({1});
  save_tensors(tensors, folder / "x");
  const auto loaded = load_tensors(folder / "x");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(identical(loaded.at(name), tensor)) << name;
  save_tensors({}, folder / "none");
  EXPECT_TRUE(load_tensors(folder / "none").empty());
}

TEST(Safetensors, WritesAnyStridesRowMajor) {
  const TempDir folder;
  const auto base = torch::arange(12.0).view({3, 4});
  const TensorMap tensors = {{"t", base.t()},
                             {"slice", base.slice(1, 1, 3)},
                             {"expanded", base.select(0, 1).expand({2, 4})},
                             {"base", base},
                             {"again", base},
                             {"grad", torch::ones({2}, torch::requires_grad())},
                             {"channels", torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)}};
  save_tensors(tensors, folder / "x");
  const auto loaded = load_tensors(folder / "x");
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(identical(loaded.at(name), tensor)) << name;
  EXPECT_FALSE(loaded.at("base").is_alias_of(loaded.at("again")));
}

TEST(Safetensors, WritesMetadataAndAlignsTensors) {
  const TempDir folder;
  save_tensors({{"a", torch::ones({3}, torch::kUInt8)}, {"b", torch::ones({1}, torch::kFloat64)}}, folder / "x",
               {.metadata = {{"step", "12"}, {"text", "\"\xc3\xa4\"\n"}}});
  const SafetensorsReader reader(folder / "x");
  EXPECT_THAT(reader.metadata(), testing::ElementsAre(testing::Pair("format", "pt"), testing::Pair("step", "12"),
                                                      testing::Pair("text", "\"\xc3\xa4\"\n")));
  EXPECT_EQ(reader.tensors().at("b").begin, 0u) << "large elements come first, so that all tensors are aligned";
  const auto file = read_file(folder / "x");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  EXPECT_EQ(file.size(), 8 + header_bytes + 8 + 3);
  EXPECT_THROW(reader.read("c"), base::UsageError);
}

TEST(Safetensors, RejectsUnsupportedTensors) {
  const TempDir folder;
  const auto path = folder.write("x", "before");
  const auto reason = [&](const TensorMap& tensors, const SaveOptions& options = {}) {
    return message_of<base::UsageError>([&] { save_tensors(tensors, path, options); });
  };
  EXPECT_THAT(reason({{"u", at::Tensor()}}), HasSubstr("undefined tensor \"u\""));
  EXPECT_THAT(reason({{"c", torch::ones({1}, torch::kComplexDouble)}}),
              HasSubstr("tensor \"c\" of dtype ComplexDouble; expected a dense tensor of F64"));
  EXPECT_THAT(reason({{"s", torch::ones({2, 2}).to_sparse()}}), HasSubstr("which is sparse"));
  EXPECT_THAT(reason({{"\xff", torch::ones({1})}}), HasSubstr("expected UTF-8 of at most 1024 bytes"));
  EXPECT_THAT(reason({{std::string(1025, 'n'), torch::ones({1})}}), HasSubstr("expected UTF-8 of at most 1024 bytes"));
  EXPECT_THAT(reason({{"__metadata__", torch::ones({1})}}), HasSubstr("other than \"__metadata__\""));
  EXPECT_THAT(reason({}, {.metadata = {{"k", "\xff"}}}), HasSubstr("SaveOptions.metadata"));
  EXPECT_THAT(reason({}, {.metadata = {{"k", std::string(1 << 20, 'v')}}}), HasSubstr("at most 128 KiB"));
  EXPECT_EQ(read_file(path), "before");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(Safetensors, RejectsWrongFileLength) {
  const TempDir folder;
  const auto reason = [&](const std::string& content) {
    const auto path = folder.write("x", content);
    const auto message = message_of<base::FormatError>([&] { load_tensors(path); });
    return message.empty() ? message : message.substr(path.size());
  };
  EXPECT_THAT(reason(""), HasSubstr(":0: the file has 0 bytes"));
  EXPECT_THAT(reason("1234567"), HasSubstr(":0: the file has 7 bytes"));
  EXPECT_THAT(reason(little_endian(0)),
              HasSubstr(":0: the header's length is 0; expected 2 to 0 (the rest of the file)"));
  EXPECT_THAT(reason(little_endian(3) + "{}"), HasSubstr("the header's length is 3; expected 2 to 2"));
  EXPECT_THAT(reason(little_endian(~std::uint64_t{0}) + "{}"),
              HasSubstr("the header's length is 18446744073709551615"));
  EXPECT_EQ(reason(little_endian(2) + "{}"), "");
  EXPECT_THAT(reason(little_endian(2) + "{}x"), HasSubstr(":10: 1 bytes after the last tensor belong to no tensor"));
  std::filesystem::resize_file(folder / "x", (std::uint64_t{17} << 20) + 8);  // sparse
  std::string header = little_endian((std::uint64_t{16} << 20) + 1);
  std::fstream(folder / "x", std::ios::in | std::ios::out | std::ios::binary).write(header.data(), 8);
  EXPECT_THAT(message_of<base::FormatError>([&] { load_tensors(folder / "x"); }),
              HasSubstr("expected 2 to 16777216 (16 MiB)"));
  EXPECT_THROW(load_tensors(folder / "missing"), base::SystemError);
  EXPECT_THROW(load_tensors(folder.path()), base::UsageError);
}

TEST(Safetensors, RejectsInvalidBool) {
  const TempDir folder;
  save_tensors({{"b", torch::tensor({true, false, true})}}, folder / "x");
  auto file = read_file(folder / "x");
  file[file.size() - 2] = 2;
  const auto path = folder.write("x", file);
  EXPECT_EQ(message_of<base::FormatError>([&] { load_tensors(path, {.verify = false}); }),
            path + ":" + std::to_string(file.size() - 2) + ": a BOOL of tensor \"b\" is 2; expected 0 or 1");
}

TEST(Safetensors, RejectsFileThatShrinks) {
  const TempDir folder;
  save_tensors({{"a", torch::ones({1000})}}, folder / "x");
  const SafetensorsReader reader(folder / "x");
  std::filesystem::resize_file(folder / "x", 1000);
  EXPECT_THAT(message_of<base::FormatError>([&] { reader.read("a"); }),
              HasSubstr(":1000: the file has become shorter"));
}

// Returns the peak memory of this process in bytes.
std::size_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == "VmHWM:") {
      std::size_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  throw std::runtime_error("no VmHWM in /proc/self/status");
}

TEST(Safetensors, CorruptFilesAreHandledInBoundedMemory) {
  const TempDir folder;
  save_tensors({{"weight", torch::ones({2, 3})}, {"flag", torch::tensor({true})}, {"n", torch::tensor(7)}},
               folder / "good", {.metadata = {{"k", "v"}}});
  const auto good = read_file(folder / "good");
  const auto before = peak_bytes();
  int num_loaded = 0;
  const auto try_load = [&](const std::string& content) {
    const auto path = folder.write("x", content);
    try {
      load_tensors(path, {.verify = false});
      ++num_loaded;
    } catch (const base::FormatError& error) {
      ASSERT_TRUE(std::string(error.what()).starts_with(path + ":")) << error.what();
    }
  };
  for (std::size_t cut = 0; cut < good.size(); ++cut) try_load(good.substr(0, cut));
  EXPECT_EQ(num_loaded, 0);
  for (std::size_t at = 0; at < good.size(); ++at)
    for (const int flip : {0x01, 0x02, 0x10, 0x20, 0x40, 0x80, 0xff}) {
      auto flipped = good;
      flipped[at] = static_cast<char>(flipped[at] ^ flip);
      try_load(flipped);
    }
  EXPECT_GT(num_loaded, 0) << "some changed values do not violate the format";
  EXPECT_LT(peak_bytes() - before, (std::size_t{16} << 20) + tests::kSanitizerQuarantineBytes);
}

}  // namespace
}  // namespace lockstep::checkpoint
