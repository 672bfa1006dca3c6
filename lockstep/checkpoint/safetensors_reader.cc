#include <fcntl.h>
#include <sys/stat.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/limits.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::checkpoint {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {

constexpr std::uint64_t kHashedAtOnce = std::uint64_t{1} << 20;  // what was read is hashed while it is in cache

[[noreturn]] void refuse(const std::string& path, std::uint64_t offset, const std::string& reason) {
  throw base::FormatError(path + ":" + std::to_string(offset) + ": " + reason);
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path, const ReadOptions& options)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)), verify_(options.verify) {
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0) throw base::SystemError("cannot read " + path, errno);
  if (!S_ISREG(status.st_mode)) throw base::UsageError("cannot read " + path + ": it is not a regular file");
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  if (file_bytes < kHeaderOffset)
    refuse(path, 0, "the file has " + std::to_string(file_bytes) + " bytes; a safetensors file begins with 8 bytes of length");
  std::uint64_t header_bytes = 0;
  read_at(0, &header_bytes, sizeof header_bytes);
  const std::uint64_t most = std::min(kMaxHeaderBytes, file_bytes - kHeaderOffset);
  if (header_bytes < 2 || header_bytes > most)
    refuse(path, 0, "the header's length is " + std::to_string(header_bytes) + "; allowed here is 2 to " + std::to_string(most) +
                        (most == kMaxHeaderBytes ? " (16 MiB)" : " (the rest of the file)"));
  std::string text(header_bytes, '\0');
  read_at(kHeaderOffset, text.data(), header_bytes);
  data_offset_ = kHeaderOffset + header_bytes;
  header_ = parse_header(text, file_bytes - data_offset_, path);
  if (verify_)
    hashes_ = TensorHashes(text, header_, path);
  else
    std::erase_if(header_.metadata, [](const auto& item) { return item.first.starts_with(kOurKeys); });
}

void SafetensorsReader::read_at(std::uint64_t offset, void* data, std::uint64_t num_bytes) const {
  auto* bytes = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t got = ::pread(file_.get(), bytes, num_bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw base::SystemError("cannot read " + path_, errno);
    if (got == 0) refuse(path_, offset, "the file has become shorter while it was read");
    bytes += got;
    offset += static_cast<std::uint64_t>(got);
    num_bytes -= static_cast<std::uint64_t>(got);
  }
}

void SafetensorsReader::read_verified(const std::string& name, const TensorEntry& entry, char* bytes) const {
  base::ContentHash hash;
  for (std::uint64_t at = entry.begin; at < entry.end;) {
    const std::uint64_t now = std::min(entry.end - at, kHashedAtOnce);
    read_at(data_offset_ + at, bytes, now);
    hash.add(bytes, now);
    bytes += now;
    at += now;
  }
  const std::string got = hash.digits(), want(hashes_.of(entry));
  if (got != want)
    refuse(path_, data_offset_ + entry.begin,
           "tensor " + base::quoted(name, 80) + " is damaged: the hash of its " + std::to_string(entry.end - entry.begin) + " bytes is " + got +
               ", and was " + want + " when they were written");
}

at::Tensor SafetensorsReader::read(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) throw base::UsageError(path_ + " holds no tensor " + base::quoted(name, 80));
  const TensorEntry& entry = found->second;
  at::Tensor tensor = torch::empty(entry.shape, torch::TensorOptions(entry.dtype->type));
  auto* const bytes = static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
  const std::uint64_t num_bytes = entry.end - entry.begin;
  if (verifies())
    read_verified(name, entry, reinterpret_cast<char*>(bytes));
  else
    read_at(data_offset_ + entry.begin, bytes, num_bytes);
  if (entry.dtype->type == c10::ScalarType::Bool) {
    // A bool of another value is undefined behaviour wherever it is looked at.
    const auto* const odd = std::find_if(bytes, bytes + num_bytes, [](std::uint8_t byte) { return byte > 1; });
    if (odd != bytes + num_bytes)
      refuse(path_, data_offset_ + entry.begin + static_cast<std::uint64_t>(odd - bytes),
             "a BOOL of tensor " + base::quoted(name, 80) + " is " + std::to_string(*odd) + "; allowed is 0 and 1");
  }
  return tensor;
}

TensorMap load_tensors(const std::string& path, const ReadOptions& options) {
  const SafetensorsReader reader(path, options);
  TensorMap tensors;
  for (const auto& [name, entry] : reader.tensors()) tensors.emplace(name, reader.read(name));
  return tensors;
}

}  // namespace lockstep::checkpoint
