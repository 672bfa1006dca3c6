#include "lockstep/checkpoint/safetensors/tensor_hashes.h"

#include <algorithm>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/embedded_hash.h"

namespace lockstep::checkpoint {
namespace {

constexpr std::string_view kBegin = "{\"__metadata__\":{\"lockstep.header\":\"";
constexpr std::string_view kTensors = "lockstep.tensors.";
constexpr std::size_t kHashesPerKey = 16384;  // half of what limits.h allows for one string

}  // namespace

std::string sealed_beginning(const std::vector<std::string>& hashes) {
  std::string text = std::string(kBegin) + kNoSeal + "\"";
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i % kHashesPerKey == 0)
      text +=
          std::string(i == 0 ? "" : "\"") + ",\"" + std::string(kTensors) + std::to_string(i / kHashesPerKey) + "\":\"";
    text += hashes[i];
  }
  return text + (hashes.empty() ? ",\"" + std::string(kTensors) + "0\":\"\"" : "\"");
}

void seal_header(std::string& text) { seal(text, kBegin.size()); }

TensorHashes::TensorHashes(std::string_view text, SafetensorsHeader& header, const std::string& file) {
  std::map<std::string, std::string> ours;
  for (auto at = header.metadata.lower_bound(std::string(kOurKeys));
       at != header.metadata.end() && at->first.starts_with(kOurKeys);)
    ours.insert(header.metadata.extract(at++));
  any_ = !ours.empty();
  if (!any_) return;
  const auto refuse = [&](const std::string& reason) {
    throw base::FormatError(file + ":" + std::to_string(kHeaderOffset) + ": " + reason);
  };
  if (!text.starts_with(kBegin) || !seal_holds(text, kBegin.size()))
    refuse("the header is damaged: it is not the one whose hash it carries (a program that copies the metadata \"" +
           std::string(kOurKeys) + "...\" into a file of its own does that, too)");
  seal_ = text.substr(kBegin.size(), kSealBytes);
  for (std::size_t i = 0; ours.contains(std::string(kTensors) + std::to_string(i)); ++i)
    digits_ += ours[std::string(kTensors) + std::to_string(i)];
  for (const auto& [name, entry] : header.tensors) places_.emplace_back(entry.begin, entry.end);
  std::sort(places_.begin(), places_.end());
  if (digits_.size() != places_.size() * kSealBytes)
    refuse("the header has " + std::to_string(digits_.size() / kSealBytes) + " hashes for its " +
           std::to_string(places_.size()) + " tensors");
}

std::string_view TensorHashes::of(const TensorEntry& entry) const {
  const auto found = std::lower_bound(places_.begin(), places_.end(), Place(entry.begin, entry.end));
  return std::string_view(digits_).substr(static_cast<std::size_t>(found - places_.begin()) * kSealBytes, kSealBytes);
}

}  // namespace lockstep::checkpoint
