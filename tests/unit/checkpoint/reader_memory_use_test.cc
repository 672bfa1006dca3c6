// Tests of the readers' memory use: at most the file's size and 16 MiB, whatever the file declares; for the values of a
// .pt that are not tensors, the limit in torch_file.h.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "lockstep/checkpoint/torch_file/zip_reader.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::TempDir;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::size_t kHeader = 15 << 20, kPickle = 20 << 20;

std::int64_t kib_in_status(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1));
  throw std::runtime_error("no " + name);
}

// Returns the peak growth of memory while `action` runs.
template <typename Action>
std::int64_t peak_growth(Action action) {
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // resets the peak
  const std::int64_t before = kib_in_status("VmRSS");
  action();
  return (kib_in_status("VmHWM") - before) * 1024;
}

std::int64_t size_of(const std::string& path) { return static_cast<std::int64_t>(std::filesystem::file_size(path)); }

class ReaderMemoryUse : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer does not return freed memory";
#endif
    // Uses the reader and the writer once, so that memory that they allocate once per process does not count.
    save_tensors({{"x", torch::ones({1000})}}, folder_ / "first");
    load_tensors(folder_ / "first");
  }
  const TempDir folder_;
};

TEST_F(ReaderMemoryUse, LargeFileMemoryIsFileSizePlus16MiB) {
  TensorMap tensors;
  Dict dict{{}, true};
  for (int i = 0; i < 8; ++i) {
    const auto tensor = torch::full({2 * kMiB}, i, torch::kFloat32);
    tensors["layer." + std::to_string(i)] = tensor;
    dict.add("layer." + std::to_string(i), tensor);
  }
  save_tensors(tensors, folder_ / "x.safetensors");
  save_torch_file(dict, folder_ / "x.pt");
  tensors.clear();
  dict = Dict();
  for (const bool verify : {true, false}) {
    EXPECT_LE(peak_growth([&] { EXPECT_EQ(load_tensors(folder_ / "x.safetensors", {.verify = verify}).size(), 8u); }),
              size_of(folder_ / "x.safetensors") + 16 * kMiB);
    EXPECT_LE(peak_growth([&] { EXPECT_TRUE(load_torch_file(folder_ / "x.pt", {.verify = verify}).as<Dict>()); }),
              size_of(folder_ / "x.pt") + 16 * kMiB);
  }
  EXPECT_LE(peak_growth([&] { SafetensorsReader(folder_ / "x.safetensors").verify(); }), 16 * kMiB)
      << "verify() keeps nothing";
}

// Reads headers close to the maximum size that describe as many tensors as possible.
TEST_F(ReaderMemoryUse, HostileHeaderMemoryIsBounded) {
  std::string many = "{", deep = "{\"a\":", metadata = "{\"__metadata__\":{";
  for (int i = 0; many.size() < kHeader; ++i)
    many += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}";
  for (int i = 0; metadata.size() < kHeader; ++i) metadata += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  many += "}";
  metadata += "}}";
  deep += std::string(kHeader, '[') + "}";
  std::string shape = "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0],\"shape\":[";
  while (shape.size() < kHeader) shape += "0,";
  shape += "0]}}";
  for (const std::string& text : {many, deep, metadata, shape}) {
    const std::uint64_t length = text.size();
    const std::string path = folder_.write("x", std::string(reinterpret_cast<const char*>(&length), 8) + text);
    EXPECT_LE(peak_growth([&] { EXPECT_THROW(load_tensors(path), base::FormatError) << text.substr(0, 20); }),
              size_of(path) + 16 * kMiB)
        << text.substr(0, 20);
  }
  // An impossible length.
  const std::uint64_t huge_length = ~std::uint64_t{0};
  const std::string path = folder_.write("x", std::string(reinterpret_cast<const char*>(&huge_length), 8) + "{}");
  EXPECT_LE(peak_growth([&] { EXPECT_THROW(load_tensors(path), base::FormatError); }), kMiB);
}

TEST_F(ReaderMemoryUse, PickleMemoryIsBounded) {
  // A pickle of 20 MB of nested lists, which is rejected while it is parsed.
  std::string pickle = "\x80\x02](";
  pickle += std::string(kPickle, ']') + "e.";
  const std::string path = folder_ / "x.pt";
  Dict dict;
  dict.add("x", std::string(kPickle + 40, 'x'));
  save_torch_file(dict, path);
  // Replaces the string in the pickle's record.
  std::string bytes = tests::read_file(path);
  const auto record = ZipReader(path).records().at("archive/data.pkl");
  ASSERT_GE(record.num_bytes, pickle.size());
  bytes.replace(record.begin, pickle.size(), pickle);
  folder_.write("x.pt", bytes);
  bytes.clear();
  bytes.shrink_to_fit();
  std::string message;
  EXPECT_LE(peak_growth([&] {
              message = tests::message_of<base::FormatError>([&] { load_torch_file(path, {.verify = false}); });
            }),
            size_of(path) + 256 * kMiB);
  EXPECT_THAT(message, HasSubstr("the pickle takes more than the limit of 128 MiB"));
}

}  // namespace
}  // namespace lockstep::checkpoint
