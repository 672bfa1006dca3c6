// Tests of the readers of IDX files and texts, and of the datasets made from them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <zlib.h>

#include <cmath>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/data/datasets/char_dataset.h"
#include "lockstep/data/datasets/corpus.h"
#include "lockstep/data/datasets/idx.h"
#include "lockstep/data/datasets/mnist.h"
#include "lockstep/data/datasets/vocabulary.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data {
namespace {

using base::FormatError;
using base::UsageError;
using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

std::string big_endian(std::uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift & 0xff);
  return bytes;
}

std::string idx_file(const std::vector<std::uint32_t>& shape, std::string_view values) {
  std::string file{0, 0, 8, static_cast<char>(shape.size())};
  for (const auto extent : shape) file += big_endian(extent);
  return file.append(values);
}

std::string gzip(const std::string& plain) {
  z_stream stream{};
  if (deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("deflateInit2");
  std::string out(deflateBound(&stream, plain.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(plain.data()));
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) throw std::runtime_error("deflate");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

TEST(ReadIdx, ReadsPlainAndGzip) {
  const TempDir folder;
  const auto plain = idx_file({2, 3}, "abcdef");
  for (const auto& path :
       {folder.write("plain", plain), folder.write("packed.gz", gzip(plain)), folder.write("packed", gzip(plain))}) {
    const auto idx = read_idx(path);
    EXPECT_THAT(idx.shape, ElementsAre(2, 3));
    EXPECT_THAT(idx.values, ElementsAre('a', 'b', 'c', 'd', 'e', 'f'));
    EXPECT_EQ(idx.values_offset, 12u);
  }
}

TEST(ReadIdx, ErrorsNameFileAndOffset) {
  const TempDir folder;
  const auto reason = [&](const std::string& content) {
    const auto path = folder.write("x", content);
    const auto message = message_of<FormatError>([&] { read_idx(path); });
    EXPECT_TRUE(message.starts_with(path + ":")) << message;
    return message.empty() ? message : message.substr(path.size());
  };
  EXPECT_THAT(reason(""), HasSubstr(":0: the file ends inside the magic number: got 0 bytes"));
  EXPECT_THAT(reason("ab"), HasSubstr(":2: the file ends inside the magic number"));
  EXPECT_THAT(reason(std::string("\1\0\10\1\0\0\0\1a", 9)), HasSubstr(":0: not an IDX file"));
  EXPECT_THAT(reason(std::string("\0\0\15\1\0\0\0\1aaaa", 12)), HasSubstr(":2: IDX type is 13; expected 8"));
  EXPECT_THAT(reason(std::string("\0\0\10\0a", 5)), HasSubstr(":3: the file has 0 dimensions; expected 1 to 4"));
  EXPECT_THAT(reason(std::string("\0\0\10\5", 4)), HasSubstr(":3: the file has 5 dimensions"));
  EXPECT_THAT(reason(idx_file({2, 3}, "abcdef").substr(0, 10)),
              HasSubstr(":10: the file ends inside the list of dimensions"));
  EXPECT_THAT(reason(idx_file({2, 3}, "abcde")),
              HasSubstr(":12: the header declares 6 values, but the file holds at most 5"));
  EXPECT_THAT(reason(idx_file({2, 3}, "abcdefg")), HasSubstr(":18: the file continues after the 6 values"));
  EXPECT_THAT(reason(gzip(idx_file({2, 3}, "abcdefg"))), HasSubstr(":18: the file continues after the 6 values"));
  EXPECT_THAT(reason(gzip(idx_file({2, 3}, "abcde"))), HasSubstr(":17: the file ends inside the values"));
  EXPECT_THAT(reason(idx_file({0xffffffff, 0xffffffff}, "")),
              HasSubstr(":4: dimension 0 is 4294967295, which exceeds the limit of 2 GiB"));
  EXPECT_THAT(reason(idx_file({65536, 65536, 65536, 65536}, "")), HasSubstr(":8: dimension 1 is 65536"));
  // A false header does not make the reader allocate the declared size, neither in a plain nor in a compressed file: 60
  // bytes cannot hold 2 GiB.
  EXPECT_THAT(reason(idx_file({1u << 31}, "a")), HasSubstr("holds at most 1"));
  EXPECT_THAT(reason(gzip(idx_file({1u << 31}, "a"))),
              HasSubstr("declares 2147483648 values, but the file holds at most"));
  EXPECT_THROW(read_idx(folder / "missing"), base::SystemError);
  EXPECT_THROW(read_idx(folder.path()), UsageError);
}

TEST(ReadIdx, RejectsTruncatedAndCorruptFiles) {
  const TempDir folder;
  std::string values(200, '\0');
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<char>(i * i % 251);
  const auto plain = idx_file({4, 50}, values), packed = gzip(plain);
  for (const auto& file : {plain, packed}) {
    for (std::size_t cut = 0; cut < file.size(); ++cut)
      EXPECT_THROW(read_idx(folder.write("x", file.substr(0, cut))), FormatError) << cut << " of " << file.size();
    for (std::size_t at = 0; at < file.size(); ++at)
      for (const char flip : {'\1', '\x80'}) {
        auto damaged = file;
        damaged[at] = static_cast<char>(damaged[at] ^ flip);
        try {
          const auto idx = read_idx(folder.write("x", damaged));
          EXPECT_EQ(idx.values.size(), 200u) << at;
          EXPECT_TRUE(file == plain || idx.values[7] == static_cast<std::uint8_t>(values[7]))
              << "the CRC must detect the flip";
        } catch (const FormatError&) {
        }
      }
  }
}

TEST(Mnist, ReturnsImagesAndLabels) {
  const TempDir folder;
  folder.write("train-images-idx3-ubyte.gz", gzip(idx_file({3, 1, 2}, std::string("\0\xff\x33\0\1\2", 6))));
  folder.write("train-labels-idx1-ubyte", idx_file({3}, std::string("\7\0\x9", 3)));
  EXPECT_TRUE(Mnist::exists(folder.path(), Mnist::Mode::kTrain));
  EXPECT_FALSE(Mnist::exists(folder.path(), Mnist::Mode::kTest));
  const auto mnist = Mnist::load(folder.path(), Mnist::Mode::kTrain);
  EXPECT_EQ(mnist.size(), 3u);
  const auto first = mnist.get(0);
  EXPECT_TRUE(first.data.equal(torch::tensor({0.0f, 1.0f}).view({1, 1, 2})));
  EXPECT_TRUE(first.target.equal(torch::tensor(std::int64_t{7})));
  const auto batch = mnist.get_batch({2, 1});
  EXPECT_TRUE(batch.target.equal(torch::tensor({std::int64_t{9}, std::int64_t{0}})));
  EXPECT_TRUE(batch.data[1].equal(torch::tensor({51 / 255.0f, 0.0f}).view({1, 1, 2})));
  const auto part = mnist.slice(1, 2);
  EXPECT_EQ(part.size(), 2u);
  EXPECT_TRUE(part.get(0).data.equal(mnist.get(1).data));
  EXPECT_TRUE(part.get(1).target.equal(mnist.get(2).target));
  EXPECT_THROW(mnist.slice(1, 3), UsageError);
  EXPECT_THROW(mnist.slice(4, 1), UsageError);
  EXPECT_THROW(mnist.slice(0, 0), UsageError);
}

TEST(Mnist, RejectsMismatchedFiles) {
  const TempDir folder;
  const auto reason = [&] { return message_of<base::Error>([&] { Mnist::load(folder.path(), Mnist::Mode::kTest); }); };
  EXPECT_EQ(reason(), "Mnist::load: the directory " + folder.path() +
                          " has neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte.gz");
  folder.write("t10k-images-idx3-ubyte", idx_file({2, 1, 1}, "ab"));
  EXPECT_THAT(reason(), HasSubstr("neither t10k-labels-idx1-ubyte nor"));
  folder.write("t10k-labels-idx1-ubyte", idx_file({3}, std::string("\1\2\3", 3)));
  EXPECT_THAT(reason(), HasSubstr("t10k-labels-idx1-ubyte:4: 3 labels for the 2 images"));
  folder.write("t10k-labels-idx1-ubyte", idx_file({2}, std::string("\1\xc", 2)));
  EXPECT_THAT(reason(), HasSubstr("t10k-labels-idx1-ubyte:9: label is 12; expected 0 to 9"));
  folder.write("t10k-labels-idx1-ubyte", idx_file({2, 1}, std::string("\1\2", 2)));
  EXPECT_THAT(reason(), HasSubstr("t10k-labels-idx1-ubyte:3: the file has 2 dimensions; expected 1"));
  folder.write("t10k-images-idx3-ubyte", idx_file({0, 28, 28}, ""));
  EXPECT_THAT(reason(), HasSubstr("a dimension is 0; expected at least 1"));
}

// Uses the published files if they are installed (LOCKSTEP_TEST_DATA), otherwise small generated files.
TEST(Mnist, ReadsCompleteFiles) {
  const TempDir made;
  std::string folder = LOCKSTEP_MNIST;
  // The published digit counts and mean of this file.
  std::vector<std::int64_t> counts{980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009};
  double mean = 0.1325;
  if (!Mnist::exists(folder, Mnist::Mode::kTest)) {
    folder = made.path();
    counts.assign(10, 30);
    mean = 4.5 * 20 / 255;
    std::string pixels, labels;
    for (int i = 0; i < 300; ++i) {
      pixels.append(28 * 28, static_cast<char>(i % 10 * 20));
      labels.push_back(static_cast<char>(i % 10));
    }
    made.write("t10k-images-idx3-ubyte", idx_file({300, 28, 28}, pixels));
    made.write("t10k-labels-idx1-ubyte", idx_file({300}, labels));
  }
  const auto mnist = Mnist::load(folder, Mnist::Mode::kTest);
  std::vector<std::size_t> all(mnist.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  const auto batch = mnist.get_batch(all);
  EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({static_cast<std::int64_t>(all.size()), 1, 28, 28}));
  EXPECT_TRUE(torch::bincount(batch.target).equal(torch::tensor(counts, torch::kInt64)));
  EXPECT_NEAR(batch.data.mean().item<double>(), mean, 1e-4);
}

TEST(ReadCorpus, ConcatenatesFilesInPathOrder) {
  const TempDir folder;
  folder.write("b.txt", "two ");
  folder.write("a.txt", "one ");
  folder.write("sub/c.txt", "three ");
  folder.write("sub/d.h", "header");
  std::filesystem::create_symlink(folder / "a.txt", folder / "link.txt");
  EXPECT_EQ(read_corpus(folder.path()), "one two three header");
  EXPECT_EQ(read_corpus(folder.path(), {.extensions = {".txt"}}), "one two three ");
  EXPECT_EQ(read_corpus(folder.path(), {.extensions = {".h", ".txt"}, .max_bytes = 6}), "one tw");
  EXPECT_EQ(read_corpus(folder / "b.txt"), "two ");
  EXPECT_EQ(read_corpus(folder / "link.txt", {.max_bytes = 2}), "on") << "the given path itself may be a link";
}

TEST(ReadCorpus, RejectsPathsWithoutText) {
  const TempDir folder;
  EXPECT_THAT(message_of<UsageError>([&] { read_corpus(folder / "none"); }), HasSubstr("does not exist"));
  EXPECT_THAT(message_of<UsageError>([&] { read_corpus(folder.path()); }), HasSubstr("has no file"));
  folder.write("a.txt", "");
  EXPECT_THAT(message_of<UsageError>([&] { read_corpus(folder.path(), {.extensions = {".h", ".cc"}}); }),
              HasSubstr("has no file that ends in .h, .cc"));
  EXPECT_THAT(message_of<UsageError>([&] { read_corpus(folder / "a.txt"); }), HasSubstr("contains no text"));
  EXPECT_THAT(message_of<UsageError>([&] { read_corpus("/dev/null"); }),
              HasSubstr("neither a regular file nor a directory"));
  EXPECT_THROW(read_corpus(folder.path(), {.max_bytes = 0}), UsageError);
}

TEST(Vocabulary, ContainsCharactersOfTheText) {
  const std::string text =
      "b\xc3\xa4"
      "a b\xe2\x82\xac";  // bäa b€
  const auto vocabulary = Vocabulary::from_text(text);
  EXPECT_THAT(vocabulary.symbols(), ElementsAre(" ", "a", "b", "\xc3\xa4", "\xe2\x82\xac"));
  EXPECT_THAT(vocabulary.encode("a\xc3\xa4 "), ElementsAre(1, 3, 0));
  EXPECT_EQ(vocabulary.decode({2, 3, 1, 0, 2, 4}), text);
  EXPECT_EQ(message_of<UsageError>([&] { vocabulary.encode("ab\xc3\xb6"); }),
            "the character \"\xc3\xb6\" at byte 2 is not in the vocabulary of 5 symbols");
  EXPECT_THROW(vocabulary.decode({5}), UsageError);
  EXPECT_THROW(vocabulary.decode({-1}), UsageError);
  EXPECT_EQ(Vocabulary(vocabulary.symbols()).encode(text), vocabulary.encode(text));
}

TEST(Vocabulary, RoundTripsInvalidUtf8) {
  // A truncated sequence, an overlong one, a surrogate, a byte that never occurs, and NUL.
  for (const std::string& text : {std::string("a\xc3"), std::string("\xc0\xaf"), std::string("\xed\xa0\x80"),
                                  std::string("x\xff"), std::string("a\0b", 3)}) {
    for (const auto& vocabulary : {Vocabulary::from_text(text), Vocabulary::bytes()}) {
      const auto ids = vocabulary.encode(text);
      EXPECT_EQ(vocabulary.decode({ids.begin(), ids.end()}), text);
    }
  }
  EXPECT_EQ(Vocabulary::bytes().size(), 256u);
  EXPECT_THAT(Vocabulary::bytes().encode("\xc3\xa4"), ElementsAre(0xc3, 0xa4));
}

TEST(Vocabulary, RejectsInvalidSymbols) {
  EXPECT_THROW(Vocabulary({"a", ""}), UsageError);
  EXPECT_THROW(Vocabulary({"ab"}), UsageError);
  EXPECT_THROW(Vocabulary({"\xc3\xa4", "\xc3\xa4"}), UsageError);
  EXPECT_EQ(message_of<UsageError>([] { Vocabulary({"a", "b", "a"}); }),
            "symbol \"a\" is in the vocabulary twice, at 0 and 2");
}

std::vector<std::int64_t> values(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<std::int64_t>(), tensor.const_data_ptr<std::int64_t>() + tensor.numel()};
}

TEST(CharDataset, TargetIsNextCharacter) {
  const CharDataset dataset({10, 11, 12, 13, 14, 15, 16, 17}, {.block_size = 3});
  EXPECT_EQ(dataset.size(), 2u);  // a third window would lack its last target
  EXPECT_THAT(values(dataset.get(1).data), ElementsAre(13, 14, 15));
  EXPECT_THAT(values(dataset.get(1).target), ElementsAre(14, 15, 16));
  const CharDataset every({10, 11, 12, 13, 14, 15, 16, 17}, {.block_size = 3, .stride = 1});
  EXPECT_EQ(every.size(), 5u);
  EXPECT_THAT(values(every.get(4).target), ElementsAre(15, 16, 17));
  const auto batch = every.get_batch({0, 4});
  EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({2, 3}));
  EXPECT_THAT(values(batch.data), ElementsAre(10, 11, 12, 14, 15, 16));
}

TEST(CharDataset, SplitPartsDoNotOverlap) {
  std::vector<std::int32_t> ids(100);
  for (int i = 0; i < 100; ++i) ids[static_cast<std::size_t>(i)] = i;
  const auto [train, validation] = CharDataset(ids, {.block_size = 4, .stride = 1}).split(0.8);
  EXPECT_EQ(train.num_characters(), 80u);
  EXPECT_EQ(train.size(), 76u);
  EXPECT_EQ(validation.size(), 16u);
  EXPECT_EQ(values(train.get(train.size() - 1).target).back(), 79);
  EXPECT_EQ(values(validation.get(0).data).front(), 80);
  EXPECT_EQ(values(validation.get(validation.size() - 1).target).back(), 99);
  const auto [first, second] = validation.split(0.5);
  EXPECT_EQ(values(second.get(0).data).front(), 90);
  EXPECT_EQ(first.size(), 6u);
}

TEST(CharDataset, RejectsTextWithoutAWindow) {
  EXPECT_EQ(
      message_of<UsageError>([] { CharDataset({1, 2, 3}, {.block_size = 3}); }),
      "CharDataset: a text of 3 characters is too short for block_size 3; expected a block_size below the length of "
      "the text");
  EXPECT_THROW(CharDataset({}, {.block_size = 1}), UsageError);
  EXPECT_THROW(CharDataset({1, 2, 3}, {.block_size = 0}), UsageError);
  const CharDataset dataset(std::vector<std::int32_t>(100, 1), {.block_size = 10});
  for (const double fraction : {0.0, 1.0, -1.0, 0.05, 0.95, std::nan("")})
    EXPECT_THROW(dataset.split(fraction), UsageError);
}

}  // namespace
}  // namespace lockstep::data
