#include "lockstep/checkpoint/safetensors/safetensors.h"

#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/atomic_file.h"
#include "lockstep/checkpoint/files/embedded_hash.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint::inline safetensors {
namespace {

struct TensorToWrite {
  const std::string* name;
  const at::Tensor* tensor;
  const SafetensorsDtype* dtype;
};

// Returns the tensors in file order: large elements first, so that every tensor is aligned for readers that map the
// file.
std::vector<TensorToWrite> plan_tensors(const TensorMap& tensors) {
  std::vector<TensorToWrite> plan;
  for (const auto& [name, tensor] : tensors) {
    if (name.size() > files::kMaxNameBytes || !base::is_utf8(name) || name == "__metadata__")
      throw base::UsageError("cannot save a tensor under the name " + base::quoted(name, 80) +
                             "; expected UTF-8 of at most 1024 bytes other than \"__metadata__\"");
    if (!tensor.defined()) throw base::UsageError("cannot save the undefined tensor " + base::quoted(name, 80));
    const SafetensorsDtype* const dtype = find_dtype(tensor.scalar_type());
    if (!dtype || tensor.layout() != c10::kStrided)
      throw base::UsageError("cannot save tensor " + base::quoted(name, 80) + " of dtype " +
                             c10::toString(tensor.scalar_type()) +
                             (tensor.layout() == c10::kStrided ? "" : ", which is sparse") +
                             "; expected a dense tensor of " + dtype_names());
    plan.push_back({&name, &tensor, dtype});
  }
  std::stable_sort(plan.begin(), plan.end(), [](const TensorToWrite& a, const TensorToWrite& b) {
    return a.dtype->num_bytes > b.dtype->num_bytes;
  });
  return plan;
}

// Returns ,"key":"value" for each entry.
std::string metadata_text(const SaveOptions& options) {
  auto metadata = options.metadata;
  metadata.emplace("format", "pt");
  std::string text;
  for (const auto& [key, value] : metadata) {
    if (key.size() > files::kMaxNameBytes || value.size() > files::kMaxTokenBytes / 8 || !base::is_utf8(key) ||
        !base::is_utf8(value) || key.starts_with(kMetadataPrefix))
      throw base::UsageError("SaveOptions.metadata has " + base::quoted(key, 80) + " = " + base::quoted(value, 80) +
                             "; expected keys of at most 1024 bytes that do not begin with \"lockstep.\", and values "
                             "of at most 128 KiB, both UTF-8");
    text += "," + nlohmann::json(key).dump() + ":" + nlohmann::json(value).dump();
  }
  return text;
}

struct HeaderText {
  std::string text;
  std::uint64_t num_data_bytes = 0;
};

HeaderText make_header(const std::vector<TensorToWrite>& plan, const std::vector<std::string>& hashes,
                       const SaveOptions& options) {
  std::string text = header_prefix(hashes) + metadata_text(options) + "}";
  std::uint64_t end = 0;
  for (const auto& [name, tensor, dtype] : plan) {
    const std::uint64_t begin = end;
    end += static_cast<std::uint64_t>(tensor->numel()) * dtype->num_bytes;
    text += "," + nlohmann::json(*name).dump() + ":{\"dtype\":\"" + std::string(dtype->name) +
            "\",\"shape\":" + nlohmann::json(tensor->sizes().vec()).dump() + ",\"data_offsets\":[" +
            std::to_string(begin) + "," + std::to_string(end) + "]}";
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  embed_header_hash(text);
  return {text, end};
}

// Writes a tensor and returns its hash.
std::string write_tensor(files::AtomicFile& file, const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().to(c10::kCPU).resolve_conj().resolve_neg().contiguous();
  const auto* const bytes = static_cast<const char*>(dense.const_data_ptr());
  base::ContentHash hash;
  for (std::size_t at = 0; at < dense.nbytes(); at += kHashChunkBytes) {
    const std::size_t chunk_bytes = std::min<std::size_t>(dense.nbytes() - at, kHashChunkBytes);
    hash.add(bytes + at, chunk_bytes);
    file.write(bytes + at, chunk_bytes);
  }
  return hash.hex_digest();
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

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

// Reads the tensor in chunks to `bytes`, or, if that is null, each chunk to the same buffer.
void SafetensorsReader::read_verified(const std::string& name, const TensorEntry& entry, char* bytes) const {
  const auto buffer =
      std::make_unique_for_overwrite<char[]>(bytes ? 0 : std::min(entry.end - entry.begin, kHashChunkBytes));
  base::ContentHash hash;
  for (std::uint64_t at = entry.begin; at < entry.end;) {
    const std::uint64_t chunk_bytes = std::min(entry.end - at, kHashChunkBytes);
    char* const chunk = bytes ? bytes + (at - entry.begin) : buffer.get();
    file_.read(data_offset_ + at, chunk, chunk_bytes);
    hash.add(chunk, chunk_bytes);
    at += chunk_bytes;
  }
  const std::string actual = hash.hex_digest(), expected(hashes_.hash_of(entry));
  if (actual != expected)
    file_.throw_format_error(data_offset_ + entry.begin, "tensor " + base::quoted(name, 80) +
                                                             " is damaged: the hash of its " +
                                                             std::to_string(entry.end - entry.begin) + " bytes is " +
                                                             actual + "; expected " + expected);
}

void SafetensorsReader::verify() const {
  if (!can_verify()) return;
  for (const auto& [name, entry] : header_.tensors) read_verified(name, entry, nullptr);
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

void save_tensors(const TensorMap& tensors, const std::string& path, const SaveOptions& options) {
  const auto plan = plan_tensors(tensors);
  // The hashes are known only after the data are written. Until then the file has a header of the same length with
  // placeholders.
  std::vector<std::string> hashes(plan.size(), files::kHashPlaceholder);
  const HeaderText draft = make_header(plan, hashes, options);
  if (draft.text.size() > files::kMaxHeaderBytes)
    throw base::FormatError(path + ":0: the header of " + std::to_string(tensors.size()) + " tensors has " +
                            std::to_string(draft.text.size()) + " bytes; expected at most 16 MiB");
  // Ensures that the reader accepts the file.
  parse_header(draft.text, draft.num_data_bytes, path);
  files::AtomicFile file(path);
  const std::uint64_t header_bytes = draft.text.size();
  file.write(&header_bytes, sizeof header_bytes);
  file.write(draft.text.data(), header_bytes);
  for (std::size_t i = 0; i < plan.size(); ++i) hashes[i] = write_tensor(file, *plan[i].tensor);
  file.overwrite(kHeaderOffset, make_header(plan, hashes, options).text.data(), header_bytes);
  file.commit();
}

}  // namespace lockstep::checkpoint::inline safetensors
