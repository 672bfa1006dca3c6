// Writes JPEG files whose size is that of photographs, for benchmarks: noise with the spectrum of photographs, 100 KB
// for 500 x 375 pixels. Files are FOLDER/CLASS/NUMBER.jpg, in four classes.
//
//   bench_make_images FOLDER WIDTH HEIGHT COUNT
#include <lockstep/lockstep.h>

#include <filesystem>
#include <fstream>

#include "tests/support/jpeg_writer.h"

namespace {

constexpr int kClasses = 4;

/// Returns float noise whose amplitude falls with the 1.1th power of the frequency, with a standard deviation of 1.
at::Tensor noise(const at::Tensor& frequency) {
  const at::Tensor plane = at::real(at::fft_ifft2(at::fft_fft2(at::randn_like(frequency)) / frequency.pow(1.1)));
  return plane / plane.std();
}

/// Returns uint8 [height, width, 3].
at::Tensor photograph(const at::Tensor& frequency) {
  const at::Tensor light = noise(frequency);
  const at::Tensor red = light + 0.3 * noise(frequency), blue = light + 0.3 * noise(frequency);
  return (at::stack({red, light, blue}, 2) * 50 + 120).clamp(0, 255).to(at::kByte).contiguous();
}

int run(const std::string& folder, int width, int height, int count) {
  torch::manual_seed(1);
  at::Tensor frequency = at::hypot(at::fft_fftfreq(height).unsqueeze(1), at::fft_fftfreq(width).unsqueeze(0));
  frequency[0][0] = 1;
  for (int i = 0; i < count; ++i) {
    const std::filesystem::path directory = std::filesystem::path(folder) / std::to_string(i % kClasses);
    std::filesystem::create_directories(directory);
    const at::Tensor pixels = photograph(frequency);
    const std::uint8_t* values = pixels.const_data_ptr<std::uint8_t>();
    const auto pixel = [&](int x, int y) -> lockstep::tests::Pixel {
      const std::uint8_t* at = values + 3 * (static_cast<std::int64_t>(y) * width + x);
      return {at[0], at[1], at[2]};
    };
    std::ofstream file(directory / (std::to_string(i) + ".jpg"), std::ios::binary);
    file << lockstep::tests::jpeg_file(width, height, pixel, {.quality = 92});
    if (!file.flush()) throw lockstep::UsageError("cannot write to " + directory.string());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) {
    if (count != 5) throw lockstep::UsageError("usage: bench_make_images FOLDER WIDTH HEIGHT COUNT");
    return run(words[1], std::stoi(words[2]), std::stoi(words[3]), std::stoi(words[4]));
  });
}
