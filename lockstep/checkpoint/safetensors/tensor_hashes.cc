#include "lockstep/checkpoint/safetensors/tensor_hashes.h"

#include <algorithm>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/embedded_hash.h"

namespace lockstep::checkpoint::inline safetensors {
namespace {

constexpr std::string_view kBegin = "{\"__metadata__\":{\"lockstep.header\":\"";
constexpr std::string_view kTensors = "lockstep.tensors.";
constexpr std::size_t kHashesPerKey = 16384;  // half of kMaxTokenBytes

}  // namespace

std::string header_prefix(const std::vector<std::string>& hashes) {
  std::string text = std::string(kBegin) + files::kHashPlaceholder + "\"";
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i % kHashesPerKey == 0)
      text +=
          std::string(i == 0 ? "" : "\"") + ",\"" + std::string(kTensors) + std::to_string(i / kHashesPerKey) + "\":\"";
    text += hashes[i];
  }
  return text + (hashes.empty() ? ",\"" + std::string(kTensors) + "0\":\"\"" : "\"");
}

void embed_header_hash(std::string& text) { files::embed_hash(text, kBegin.size()); }

TensorHashes::TensorHashes(std::string_view text, SafetensorsHeader& header, const std::string& file) {
  std::map<std::string, std::string> own_metadata;
  for (auto at = header.metadata.lower_bound(std::string(kMetadataPrefix));
       at != header.metadata.end() && at->first.starts_with(kMetadataPrefix);)
    own_metadata.insert(header.metadata.extract(at++));
  has_hashes_ = !own_metadata.empty();
  if (!has_hashes_) return;
  const auto throw_format_error = [&](const std::string& reason) {
    throw base::FormatError(file + ":" + std::to_string(kHeaderOffset) + ": " + reason);
  };
  if (!text.starts_with(kBegin) || !files::is_hash_valid(text, kBegin.size()))
    throw_format_error(
        "the header is damaged: its contents do not match its hash (or another program copied the metadata \"" +
        std::string(kMetadataPrefix) + "...\" into its own file)");
  header_hash_ = text.substr(kBegin.size(), files::kHashDigits);
  for (std::size_t i = 0; own_metadata.contains(std::string(kTensors) + std::to_string(i)); ++i)
    hashes_ += own_metadata[std::string(kTensors) + std::to_string(i)];
  for (const auto& [name, entry] : header.tensors) byte_ranges_.emplace_back(entry.begin, entry.end);
  std::sort(byte_ranges_.begin(), byte_ranges_.end());
  if (hashes_.size() != byte_ranges_.size() * files::kHashDigits)
    throw_format_error("the header has " + std::to_string(hashes_.size() / files::kHashDigits) + " hashes for its " +
                       std::to_string(byte_ranges_.size()) + " tensors");
}

std::string_view TensorHashes::hash_of(const TensorEntry& entry) const {
  const auto found = std::lower_bound(byte_ranges_.begin(), byte_ranges_.end(), ByteRange(entry.begin, entry.end));
  return std::string_view(hashes_).substr(static_cast<std::size_t>(found - byte_ranges_.begin()) * files::kHashDigits,
                                          files::kHashDigits);
}

}  // namespace lockstep::checkpoint::inline safetensors
