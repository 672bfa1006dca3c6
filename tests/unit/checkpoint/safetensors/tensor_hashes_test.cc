// Tests that the hashes of a safetensors file detect every change.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/files/embedded_hash.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "tests/support/sanitizer.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using tests::message_of;
using tests::read_file;
using tests::TempDir;

void write_byte(const base::Fd& file, std::size_t at, char byte) {
  ASSERT_EQ(::pwrite(file.get(), &byte, 1, static_cast<off_t>(at)), 1);
}

std::string load_error(const std::string& path, const ReadOptions& options = {}) {
  return message_of<base::FormatError>([&] { load_tensors(path, options); });
}

// Flips bits of the file one after another and passes each error of the reader to `look`.
template <typename Next, typename Look>
void flip_bits(const std::string& path, Next next, std::size_t num_flips, Look check) {
  const std::string good = read_file(path);
  const base::Fd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  for (std::size_t i = 0; i < num_flips; ++i) {
    const std::size_t bit = next(i);
    write_byte(file, bit / 8, static_cast<char>(good[bit / 8] ^ (1 << bit % 8)));
    check(bit / 8, load_error(path));
    write_byte(file, bit / 8, good[bit / 8]);
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(load_error(path), "");
}

TEST(TensorHashes, DetectsEveryBitFlipAndTruncation) {
  const TempDir folder;
  const std::string path = folder / "x";
  save_tensors({{"weight", torch::ones({2, 3})},
                {"flag", torch::tensor({true})},
                {"n\n", torch::tensor(7)},
                {"none", torch::empty({0})}},
               path, {.metadata = {{"k", "\x1f"}}});
  const std::string good = read_file(path);
  flip_bits(
      path, [](std::size_t i) { return i; }, good.size() * 8,
      [&](std::size_t at, const std::string& message) {
        EXPECT_THAT(message, StartsWith(path + ":")) << "byte " << at;
      });
  for (std::size_t cut = 0; cut < good.size(); ++cut) {
    std::filesystem::resize_file(folder.write("x", good), cut);
    EXPECT_THAT(load_error(path), StartsWith(path + ":")) << cut;
  }
}

TEST(TensorHashes, BitFlipErrorsNameTheTensor) {
  const TempDir folder;
  const std::string path = folder / "x";
  TensorMap tensors;
  for (int i = 0; i < 20; ++i) tensors["layer." + std::to_string(i)] = torch::full({50}, i, torch::kFloat32);
  save_tensors(tensors, path);
  const SafetensorsReader reader(path);
  ASSERT_TRUE(reader.can_verify());
  const std::size_t data = read_file(path).size() - 20 * 50 * 4;
  std::mt19937_64 random(1);
  const std::size_t count = tests::kIsSanitized ? 4000 : 90000;
  std::size_t named = 0;
  flip_bits(
      path, [&](std::size_t) { return random() % (8 * (data + 20 * 50 * 4)); }, count,
      [&](std::size_t at, const std::string& message) {
        ASSERT_THAT(message, StartsWith(path + ":")) << "byte " << at;
        if (at < data) return;
        for (const auto& [name, entry] : reader.tensors()) {
          if (at < data + entry.begin || at >= data + entry.end) continue;
          ASSERT_THAT(message, HasSubstr("tensor \"" + name + "\" is damaged: the hash of its 200 bytes is "));
          ++named;
        }
      });
  EXPECT_GT(named, count * 4 / 9);
}

TEST(TensorHashes, DetectsSwappedTensors) {
  const TempDir folder;
  const std::string path = folder / "x";
  save_tensors({{"a", torch::zeros({4})}, {"b", torch::ones({4})}}, path);
  std::string file = read_file(path);
  std::swap_ranges(file.end() - 32, file.end() - 16, file.end() - 16);
  folder.write("x", file);
  EXPECT_THAT(load_error(path), HasSubstr("tensor \"a\" is damaged"));
  EXPECT_EQ(load_error(path, {.verify = false}), "");
  EXPECT_TRUE(load_tensors(path, {.verify = false}).at("a").equal(torch::ones({4})));
}

TEST(TensorHashes, DetectsWellFormedHeaderChanges) {
  const TempDir folder;
  const std::string path = folder / "x";
  save_tensors({{"a", torch::zeros({4})}, {"b", torch::ones({4})}}, path);
  std::string file = read_file(path);
  for (const auto& [was, now] :
       {std::pair("\"a\":", "\"c\":"), std::pair("[4]", "[ 4"), std::pair("\"format\":\"pt\"", "\"format\":\"tp\"")}) {
    std::string changed = file;
    const auto at = changed.find(was);
    ASSERT_NE(at, std::string::npos);
    changed.replace(at, std::string(was).size(), now);
    folder.write("x", changed);
    EXPECT_NE(load_error(path), "") << was;
  }
  // Another program wrote other tensors with Lockstep's metadata.
  const auto hashes = file.substr(8, file.find("\"format\"") - 8 - 1);
  std::string text = hashes + "},\"z\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
  const std::uint64_t length = text.size();
  folder.write("x", std::string(reinterpret_cast<const char*>(&length), 8) + text + "z");
  EXPECT_THAT(load_error(path), HasSubstr("the header is damaged: its contents do not match its hash"));
  EXPECT_EQ(load_error(path, {.verify = false}), "");
}

TEST(TensorHashes, ReadsFilesWithoutHashes) {
  const TempDir folder;
  const std::string text = R"({"__metadata__":{"k":"v"},"z":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const std::uint64_t length = text.size();
  const auto path = folder.write("x", std::string(reinterpret_cast<const char*>(&length), 8) + text + "\x07");
  const SafetensorsReader reader(path);
  EXPECT_FALSE(reader.can_verify());
  EXPECT_EQ(reader.read("z").item<int>(), 7);
  EXPECT_THAT(reader.metadata(), testing::ElementsAre(testing::Pair("k", "v")));
  EXPECT_THAT(message_of<base::UsageError>([&] { save_tensors({}, folder / "y", {.metadata = {{"lockstep.x", ""}}}); }),
              HasSubstr("SaveOptions.metadata has \"lockstep.x\""));
}

TEST(TensorHashes, SplitsManyHashesOverSeveralKeys) {
  const TempDir folder;
  TensorMap tensors;
  for (int i = 0; i < 40000; ++i) tensors[std::to_string(i)] = torch::tensor(static_cast<std::uint8_t>(i));
  save_tensors(tensors, folder / "x");
  const SafetensorsReader reader(folder / "x");
  EXPECT_THAT(reader.metadata(), testing::ElementsAre(testing::Pair("format", "pt")));
  for (const int i : {0, 16383, 16384, 39999}) EXPECT_EQ(reader.read(std::to_string(i)).item<int>(), i % 256);
}

TEST(TensorHashes, DamagedFileDoesNotChangeModule) {
  const TempDir folder;
  torch::nn::Linear saved(2, 3), loaded(2, 3);
  save(saved, folder / "x");
  std::string file = read_file(folder / "x");
  file.back() = static_cast<char>(file.back() ^ 4);
  folder.write("x", file);
  const auto before = loaded->weight.clone();
  EXPECT_THAT(message_of<base::FormatError>([&] { load(loaded, folder / "x"); }),
              HasSubstr("tensor \"weight\" is damaged"));
  EXPECT_TRUE(loaded->weight.equal(before));
  EXPECT_NO_THROW(load(loaded, folder / "x", {.verify = false}));
}

TEST(TensorHashes, EmbeddedHashMatchesItsTextOnly) {
  std::string text = "before" + files::kHashPlaceholder + "behind";
  files::embed_hash(text, 6);
  EXPECT_TRUE(files::is_hash_valid(text, 6));
  EXPECT_FALSE(files::is_hash_valid(text + " ", 6));
  EXPECT_FALSE(files::is_hash_valid(text, 7));
  EXPECT_FALSE(files::is_hash_valid("short", 0));
  base::ContentHash hash;
  hash.add("before" + files::kHashPlaceholder + "behind");
  EXPECT_EQ(text.substr(6, files::kHashDigits), hash.hex_digest());
}

}  // namespace
}  // namespace lockstep::checkpoint
