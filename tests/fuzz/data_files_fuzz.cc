// Files of others: the first byte says which kind the rest is taken for.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/data/idx.h"
#include "lockstep/data/position.h"
#include "lockstep/data/vocabulary.h"

using namespace lockstep;

namespace {

void idx(std::string_view bytes) {
  const base::Fd fd(::memfd_create("idx", MFD_CLOEXEC));
  if (::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  const data::IdxBytes read = data::read_idx("/proc/self/fd/" + std::to_string(fd.get()));
  std::int64_t count = 1;
  for (const std::int64_t size : read.shape) count *= size;
  if (count != static_cast<std::int64_t>(read.values.size())) std::abort();
}

void safetensors(std::string_view bytes) {
  if (bytes.size() < 2) return;
  const std::uint64_t num_data_bytes = 4 * static_cast<unsigned char>(bytes[0]);
  const auto header = checkpoint::parse_header(bytes.substr(1), num_data_bytes, "file");
  std::uint64_t sum = 0;
  for (const auto& [name, entry] : header.tensors) sum += entry.end - entry.begin;
  if (sum != num_data_bytes) std::abort();
}

void vocabulary(std::string_view bytes) {
  const data::Vocabulary symbols = data::Vocabulary::of(bytes);
  const auto ids = symbols.encode(bytes);
  if (symbols.decode({ids.begin(), ids.end()}) != bytes) std::abort();
}

void position(std::string_view bytes) {
  if (data::to_text(data::parse_position(bytes)) != bytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  constexpr void (*kinds[])(std::string_view) = {idx, safetensors, vocabulary, position};
  try {
    kinds[data[0] % 4](bytes);
  } catch (const base::Error&) {
  }
  return 0;
}
