// Starting trainings in tests, and reading their results.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/spawn.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {

using Words = std::vector<std::string>;

/// Runs `lockstep run -n RANKS WORDS...` and expects exit code `code`.
inline ProcessResult run_ranks(int ranks, const Words& words, int code = 0) {
  Words argv = {LOCKSTEP_PROGRAM_PATH, "run", "-n", std::to_string(ranks), "--bind", "none", "--"};
  argv.insert(argv.end(), words.begin(), words.end());
  // One thread per rank: more threads than cores slow down processes that wait for each other.
  ProcessResult exit = run_process({.argv = argv, .env = {{"OMP_NUM_THREADS", "1"}}}, std::chrono::seconds(200));
  EXPECT_EQ(exit.code, code) << exit.out << exit.err;
  return exit;
}

/// Reads the losses in a file, one per line.
inline std::vector<double> read_losses(const std::string& path) {
  std::istringstream text(read_file(path));
  std::vector<double> losses;
  for (double loss; text >> loss;) losses.push_back(loss);
  return losses;
}

/// Returns the largest relative difference of the first `count` losses; expects that both lists have that many.
inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b, std::size_t count) {
  EXPECT_GE(a.size(), count);
  EXPECT_GE(b.size(), count);
  double largest = 0;
  for (std::size_t i = 0; i < std::min({a.size(), b.size(), count}); ++i)
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(a[i]));
  return largest;
}

/// Returns the number after the last `label` in `text`; NaN if there is none.
inline double last_number_after(const std::string& text, const std::string& label) {
  const std::size_t position = text.rfind(label);
  return position == std::string::npos ? NAN : std::strtod(text.c_str() + position + label.size(), nullptr);
}

/// Writes `count` images of ten classes, which a network learns in a few steps, as the test files of MNIST. Some labels
/// in the first nine tenths are wrong, so that the loss does not vanish, which would make relative differences
/// meaningless.
inline void write_synthetic_mnist(const TempDir& folder, std::uint32_t count) {
  const auto be32 = [](std::uint32_t value) {
    std::string bytes;
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
    return bytes;
  };
  std::string images = be32(0x803) + be32(count) + be32(28) + be32(28), labels = be32(0x801) + be32(count);
  std::uint32_t noise = 1;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t digit = i * 7 % 10;
    labels += static_cast<char>(i < count / 10 * 9 && i % 8 == 0 ? (digit + 1) % 10 : digit);
    for (std::uint32_t pixel = 0; pixel < 28 * 28; ++pixel) {
      noise = noise * 1664525 + 1013904223;
      const std::uint32_t row = pixel / 28, column = pixel % 28;
      const bool inside = row / 14 == digit / 5 && column / 5 == digit % 5;
      images += static_cast<char>((noise >> 27) + (inside ? 200 : 0));
    }
  }
  folder.write("t10k-images-idx3-ubyte", images);
  folder.write("t10k-labels-idx1-ubyte", labels);
}

}  // namespace lockstep::tests
