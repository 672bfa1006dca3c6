// Reads safetensors files and verifies their hashes.
#include <torch/types.h>

#include <algorithm>
#include <bit>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/checkpoint/safetensors/tensor_hashes.h"

namespace lockstep::checkpoint::inline safetensors {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path, const ReadOptions& options)
    : file_(path), verify_(options.verify) {
  const std::uint64_t file_bytes = file_.num_bytes();
  if (file_bytes < kHeaderOffset)
    file_.throw_format_error(
        0, "the file has " + std::to_string(file_bytes) + " bytes; expected at least 8, the length of the header");
  std::uint64_t header_bytes = 0;
  file_.read(0, &header_bytes, sizeof header_bytes);
  const std::uint64_t max_header_bytes = std::min(files::kMaxHeaderBytes, file_bytes - kHeaderOffset);
  if (header_bytes < 2 || header_bytes > max_header_bytes)
    file_.throw_format_error(
        0, "the header's length is " + std::to_string(header_bytes) + "; expected 2 to " +
               std::to_string(max_header_bytes) +
               (max_header_bytes == files::kMaxHeaderBytes ? " (16 MiB)" : " (the rest of the file)"));
  std::string text(header_bytes, '\0');
  file_.read(kHeaderOffset, text.data(), header_bytes);
  data_offset_ = kHeaderOffset + header_bytes;
  header_ = parse_header(text, file_bytes - data_offset_, path);
  if (verify_)
    hashes_ = TensorHashes(text, header_, path);
  else
    std::erase_if(header_.metadata, [](const auto& item) { return item.first.starts_with(kMetadataPrefix); });
}

void SafetensorsReader::read_verified(const std::string& name, const TensorEntry& entry, char* bytes) const {
  base::ContentHash hash;
  for (std::uint64_t at = entry.begin; at < entry.end;) {
    const std::uint64_t chunk_bytes = std::min(entry.end - at, kHashChunkBytes);
    file_.read(data_offset_ + at, bytes, chunk_bytes);
    hash.add(bytes, chunk_bytes);
    bytes += chunk_bytes;
    at += chunk_bytes;
  }
  check_hash(name, entry, hash.hex_digest());
}

void SafetensorsReader::check_hash(const std::string& name, const TensorEntry& entry, const std::string& actual) const {
  const std::string expected(hashes_.hash_of(entry));
  if (actual != expected)
    file_.throw_format_error(data_offset_ + entry.begin, "tensor " + base::quoted(name, 80) +
                                                             " is damaged: the hash of its " +
                                                             std::to_string(entry.end - entry.begin) + " bytes is " +
                                                             actual + "; expected " + expected);
}

void SafetensorsReader::verify() const {
  if (!can_verify()) return;
  std::string bytes(std::min(file_.num_bytes(), kHashChunkBytes), '\0');
  for (const auto& [name, entry] : header_.tensors) {
    base::ContentHash hash;
    for (std::uint64_t at = entry.begin; at < entry.end;) {
      const std::uint64_t chunk_bytes = std::min(entry.end - at, kHashChunkBytes);
      file_.read(data_offset_ + at, bytes.data(), chunk_bytes);
      hash.add(bytes.data(), chunk_bytes);
      at += chunk_bytes;
    }
    check_hash(name, entry, hash.hex_digest());
  }
}

at::Tensor SafetensorsReader::read(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) throw base::UsageError(file_.path() + " has no tensor " + base::quoted(name, 80));
  const TensorEntry& entry = found->second;
  at::Tensor tensor = torch::empty(entry.shape, torch::TensorOptions(entry.dtype->type));
  auto* const bytes = static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
  const std::uint64_t num_bytes = entry.end - entry.begin;
  if (can_verify())
    read_verified(name, entry, reinterpret_cast<char*>(bytes));
  else
    file_.read(data_offset_ + entry.begin, bytes, num_bytes);
  if (entry.dtype->type == c10::ScalarType::Bool) {
    // Using a bool with another value is undefined behaviour.
    const auto* const invalid = std::find_if(bytes, bytes + num_bytes, [](std::uint8_t byte) { return byte > 1; });
    if (invalid != bytes + num_bytes)
      file_.throw_format_error(
          data_offset_ + entry.begin + static_cast<std::uint64_t>(invalid - bytes),
          "a BOOL of tensor " + base::quoted(name, 80) + " is " + std::to_string(*invalid) + "; expected 0 or 1");
  }
  return tensor;
}

TensorMap load_tensors(const std::string& path, const ReadOptions& options) {
  const SafetensorsReader reader(path, options);
  TensorMap tensors;
  for (const auto& [name, entry] : reader.tensors()) tensors.emplace(name, reader.read(name));
  return tensors;
}

}  // namespace lockstep::checkpoint::inline safetensors
