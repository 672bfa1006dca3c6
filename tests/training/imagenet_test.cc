// Tests of examples/04_imagenet on generated images.
#include <gmock/gmock.h>

#include <cstring>

#include "tests/support/jpeg_writer.h"
#include "tests/training/training_runs.h"

namespace lockstep::tests {
namespace {

using testing::HasSubstr;
using testing::Not;

/// Generates an image of one of four classes: horizontal, vertical or diagonal stripes, or a chessboard, each in its
/// own color, with noise.
std::string make_pattern(int kind, std::uint32_t number) {
  std::uint32_t noise = number * 2654435761u + 1;
  return jpeg_file(64, 64, [&](int x, int y) {
    constexpr std::array<std::array<int, 3>, 4> kColors{{{90, 10, 10}, {10, 90, 10}, {10, 10, 90}, {60, 60, 10}}};
    const int stripes[] = {y / 8, x / 8, (x + y) / 8, x / 8 + y / 8};
    Pixel pixel{};
    for (std::size_t i = 0; i < 3; ++i) {
      noise = noise * 1664525 + 1013904223;
      pixel[i] = static_cast<std::uint8_t>(kColors[static_cast<std::size_t>(kind)][i] + stripes[kind] % 2 * 80 +
                                           static_cast<int>(noise >> 27));
    }
    return pixel;
  });
}

/// Writes train/ and val/ with the given numbers of images per class.
void write_patterns(const TempDir& folder, std::uint32_t train, std::uint32_t val) {
  for (int kind = 0; kind < 4; ++kind)
    for (std::uint32_t i = 0; i < train + val; ++i)
      folder.write((i < train ? "train/" : "val/") + std::string(1, static_cast<char>('a' + kind)) + "/" +
                       std::to_string(i) + ".jpg",
                   make_pattern(kind, 100 * i + static_cast<std::uint32_t>(kind)));
}

ProcessResult run_imagenet(int ranks, const TempDir& folder, const Words& more, int code = 0) {
  Words words{
      LOCKSTEP_IMAGENET_PROGRAM, "--data", folder.path(), "--arch", "resnet18", "--image-size", "32", "--workers", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return run_ranks(ranks, words, code);
}

/// Reads a tensor of float32, float16 or bfloat16 from a safetensors file.
std::vector<float> read_saved_tensor(const std::string& path, const std::string& name) {
  const std::string file = read_file(path);
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const std::string entry = file.substr(8, header).substr(file.substr(8, header).find("\"" + name + "\""));
  const bool full = entry.find("\"F32\"") < entry.find('}'), half = entry.find("\"F16\"") < entry.find('}');
  const std::size_t offset = entry.find("\"data_offsets\":[") + std::strlen("\"data_offsets\":[");
  const auto begin = std::strtoull(entry.c_str() + offset, nullptr, 10),
             end = std::strtoull(entry.c_str() + entry.find(',', offset) + 1, nullptr, 10);
  std::vector<float> numbers;
  for (std::uint64_t i = begin; i < end; i += full ? 4 : 2) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, file.data() + 8 + header + i, full ? 4 : 2);
    float number = 0;
    if (half) {  // ignores infinities and subnormals
      const float magnitude =
          std::ldexp(1.0f + static_cast<float>(bits & 1023) / 1024, static_cast<int>(bits >> 10 & 31) - 15);
      number = (bits >> 10 & 31) == 0 ? 0 : bits >> 15 ? -magnitude : magnitude;
    } else {
      if (!full) bits <<= 16;
      std::memcpy(&number, &bits, 4);
    }
    numbers.push_back(number);
  }
  return numbers;
}

double largest_update(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  return largest;
}

TEST(Imagenet, TwoRanksLearnAndSavedWeightsReload) {
  const TempDir folder;
  write_patterns(folder, 24, 8);
  const ProcessResult exit = run_imagenet(
      2, folder,
      {"--batch", "8", "--epochs", "6", "--warmup", "1", "--lr", "0.05", "--save", folder / "net.safetensors"});
  EXPECT_THAT(exit.out, HasSubstr("resnet18: 96 images of 4 classes, 32 to validate; 2 ranks"));
  EXPECT_GE(last_number_after(exit.out, "accuracy "), 90) << exit.out;
  EXPECT_EQ(last_number_after(exit.out, "top-5 accuracy "), 100) << exit.out;
  const ProcessResult again = run_imagenet(1, folder, {"--epochs", "0", "--weights", folder / "net.safetensors"});
  EXPECT_EQ(last_number_after(again.out, "accuracy "), last_number_after(exit.out, "accuracy "));
  EXPECT_NEAR(last_number_after(again.out, "validation loss "), last_number_after(exit.out, "validation loss "), 2e-4);
}

/// The losses are equal because each image has the same pixels on any rank, and batch norm uses the whole batch.
TEST(Imagenet, LossesOfTwoRanksEqualOne) {
  const TempDir folder;
  write_patterns(folder, 16, 2);
  const auto losses = [&](int ranks, const std::string& batch, const Words& more) {
    Words words{"--batch", batch, "--epochs", "2", "--lr", "0.01", "--loss-log", folder / "losses"};
    words.insert(words.end(), more.begin(), more.end());
    run_imagenet(ranks, folder, words);
    return read_losses(folder / "losses");
  };
  const auto one = losses(1, "16", {}), two = losses(2, "8", {"--sync-bn"}), apart = losses(2, "8", {});
  ASSERT_EQ(one.size(), 8u);
  EXPECT_LE(largest_difference(one, two, 8), 1e-3);
  EXPECT_GT(largest_difference(one, apart, 8), 1e-3) << "batch norm has no effect, so the comparison is void";
}

/// float16 is slow on a CPU: few steps of few images, without fp16-mixed, which Gpt covers.
TEST(Imagenet, TrainsInEveryPrecision) {
  const TempDir folder;
  write_patterns(folder, 1, 1);
  const auto weights = [&](const Words& more) {
    // Nearly uniform targets have small gradients, so that the scale of O2 decreases only twice.
    Words words{"--batch", "2", "--warmup", "0", "--label-smoothing", "0.999", "--save", folder / "net"};
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult exit = run_imagenet(2, folder, words);
    EXPECT_GT(last_number_after(exit.out, "validation loss "), 0) << exit.out;
    return read_saved_tensor(folder / "net", "fc.weight");
  };
  const auto start = weights({"--epochs", "1", "--lr", "1e-6"});
  EXPECT_EQ(start.size(), 4u * 512);
  for (const auto& [precision, epochs] : {std::pair("O0", "1"), std::pair("bf16-mixed", "1"), std::pair("bf16", "1"),
                                          std::pair("O2", "3"), std::pair("O3", "1")}) {
    const double step = largest_update(start, weights({"--epochs", epochs, "--lr", "0.5", "--precision", precision}));
    EXPECT_GT(step, 1e-3) << precision;
    EXPECT_LT(step, 1) << precision;
  }
}

/// Writes a PNG named .jpg among the training images, and a truncated file among the validation images.
std::string write_broken_images(const TempDir& folder) {
  write_patterns(folder, 2, 2);
  folder.write("val/c/2.jpg", make_pattern(2, 1).substr(0, 1000));
  return folder.write("train/b/1.jpg", "\x89PNG\r\n");
}

TEST(Imagenet, NamesABrokenImage) {
  const TempDir folder;
  const std::string broken = write_broken_images(folder);
  const ProcessResult exit = run_imagenet(2, folder, {"--batch", "2", "--epochs", "1"}, 65);
  EXPECT_THAT(exit.err, HasSubstr("04_imagenet: error: one of 2 samples that begin with sample "));
  EXPECT_THAT(exit.err, HasSubstr(": " + broken + ":0: not a JPEG but a PNG\n"));
}

TEST(Imagenet, SkipsBrokenImagesWhenAsked) {
  const TempDir folder;
  const std::string broken = write_broken_images(folder);
  const ProcessResult exit = run_imagenet(2, folder, {"--batch", "2", "--epochs", "2", "--skip-broken"});
  EXPECT_THAT(exit.err,
              HasSubstr("lockstep: warning: " + broken + ":0: not a JPEG but a PNG; another image is used instead\n"));
  EXPECT_THAT(exit.err,
              HasSubstr("/val/c/2.jpg:1000: the file is truncated: it has no end marker; the sample is ignored\n"));
  EXPECT_THAT(exit.out, HasSubstr("epoch 2: validation loss "));
  EXPECT_THAT(exit.out, HasSubstr(", of 7 images\n"));
}

/// Starts 04_imagenet with invalid arguments. Expects that it exits with 78 and prints `text`.
void expect_usage_error(const Words& words, const std::string& text) {
  Words argv{LOCKSTEP_IMAGENET_PROGRAM};
  argv.insert(argv.end(), words.begin(), words.end());
  const ProcessResult exit = run_process({.argv = argv});
  EXPECT_EQ(exit.code, 78);
  EXPECT_THAT(exit.err, HasSubstr("04_imagenet: error: " + text + "\n"));
}

TEST(Imagenet, RejectsBadArguments) {
  const TempDir folder;
  write_patterns(folder, 1, 1);
  const std::string data = folder.path();
  expect_usage_error({}, "--data is missing; expected a directory with train/CLASS/*.jpg and val/CLASS/*.jpg");
  expect_usage_error({"--data", folder / "nowhere"},
                     "ImageFolder: the directory " + (folder / "nowhere/train") + " does not exist");
  expect_usage_error({"--data", data, "--arch", "resnet101"},
                     "--arch is \"resnet101\"; expected resnet18, resnet34 or resnet50");
  expect_usage_error({"--data", data, "--precision", "int8"},
                     "precision is \"int8\"; expected 32, bf16-mixed, fp16-mixed, bf16, fp16, O0, O1, O2 or O3");
  expect_usage_error({"--data", data, "--sync-bn=1"},
                     "--sync-bn has a value or is repeated; expected --sync-bn once, without a value");
  expect_usage_error({"--data", data, "--skip-broken", "--skip-broken"},
                     "--skip-broken has a value or is repeated; expected --skip-broken once, without a value");
  expect_usage_error({"--data", data, "--save", folder / "nowhere/net"},
                     "--save is \"" + (folder / "nowhere/net") + "\"; expected a file in an existing directory");
  expect_usage_error({"--data", data, "--batch", "5"}, "--batch is \"5\"; expected at most 4 with 4 images and 1 rank");
  folder.write("val/e/1.jpg", make_pattern(0, 1));
  expect_usage_error({"--data", data}, data + "/train has 4 classes and " + data +
                                           "/val has 5 different ones; expected the same class directories in both");
}

TEST(Imagenet, PrintsHelp) {
  const ProcessResult exit = run_process({.argv = {LOCKSTEP_IMAGENET_PROGRAM, "--help"}});
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.out, HasSubstr("--skip-broken"));
  EXPECT_THAT(exit.out, Not(HasSubstr("--skip-broken VALUE")));
}

}  // namespace
}  // namespace lockstep::tests
