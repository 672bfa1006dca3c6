// Fuzzes the readers of data files. The first byte selects the file format.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/data/datasets/idx.h"
#include "lockstep/data/datasets/vocabulary.h"
#include "lockstep/data/jpeg/jpeg.h"

using namespace lockstep;

namespace {

void idx(std::string_view bytes) {
  const base::Fd fd(::memfd_create("idx", MFD_CLOEXEC));
  if (::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  const data::IdxArray read = data::read_idx("/proc/self/fd/" + std::to_string(fd.get()));
  std::int64_t count = 1;
  for (const std::int64_t size : read.shape) count *= size;
  if (count != static_cast<std::int64_t>(read.values.size())) std::abort();
}

void safetensors(std::string_view bytes) {
  if (bytes.size() < 2) return;
  const std::uint64_t num_data_bytes = 4 * static_cast<unsigned char>(bytes[0]);
  auto header = checkpoint::parse_header(bytes.substr(1), num_data_bytes, "file");
  std::uint64_t sum = 0;
  for (const auto& [name, entry] : header.tensors) sum += entry.end - entry.begin;
  if (sum != num_data_bytes) std::abort();
  const checkpoint::TensorHashes hashes(bytes.substr(1), header, "file");
  for (const auto& [name, entry] : header.tensors)
    if (hashes.has_hashes() && hashes.hash_of(entry).size() != 32) std::abort();
}

void vocabulary(std::string_view bytes) {
  const data::Vocabulary symbols = data::Vocabulary::from_text(bytes);
  const auto ids = symbols.encode(bytes);
  if (symbols.decode({ids.begin(), ids.end()}) != bytes) std::abort();
}

/// The first byte selects the region and scale. Large images are skipped, because they only take longer.
void jpeg(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto how = static_cast<unsigned char>(bytes[0]);
  data::jpeg::RgbImage pixels;
  data::jpeg::JpegRegion part;
  const auto choose = [&](int width, int height) {
    if (width > 128 || height > 128) throw base::FormatError("large");
    part.shrink = 1 << (how & 3);
    part.box = {width * (how >> 2 & 7) / 8, height * (how >> 5) / 8, 0, 0};
    part.box.width = width - part.box.left;
    part.box.height = height - part.box.top;
    if (part.box.width < part.shrink || part.box.height < part.shrink) throw base::FormatError("small");
    return part;
  };
  data::jpeg::decode_jpeg(bytes.substr(1), "file", choose, pixels);
  if (pixels.width != part.box.width / part.shrink ||
      pixels.rgb.size() != static_cast<std::size_t>(3 * pixels.width * pixels.height))
    std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  constexpr void (*kinds[])(std::string_view) = {idx, safetensors, vocabulary, jpeg};
  try {
    kinds[data[0] % 4](bytes);
  } catch (const base::Error&) {
  }
  return 0;
}
