// What a safetensors file of ours says about itself: a hash of each tensor, and one of the header, in its metadata.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/safetensors/safetensors_header.h"

namespace lockstep::checkpoint {

/// Keys of the metadata that begin so are ours: "lockstep.header", and "lockstep.tensors.0", ".1" ..., the tensors'
/// hashes, in the order of their bytes in the file. There are two kinds, so that a flipped bit in one key does not make
/// the file one without hashes.
inline constexpr std::string_view kOurKeys = "lockstep.";

/// How the text of a header begins whose metadata are `hashes` (32 digits each; any others of the right number until
/// they are known), and then the strings of others.
std::string sealed_beginning(const std::vector<std::string>& hashes);
/// Puts the header's own hash where sealed_beginning() has left room.
void seal_header(std::string& text);

/// The hashes of a file's tensors; small, since a header may describe 50,000 of them.
class TensorHashes {
 public:
  /// Of a file that is not ours.
  TensorHashes() = default;
  /// Our keys go from `header.metadata`. Throws FormatError when `text`, which `header` was read from, is not what was
  /// written.
  TensorHashes(std::string_view text, SafetensorsHeader& header, const std::string& file);

  bool any() const { return any_; }
  /// The header's own hash: since it covers those of all tensors it stands for the whole file. "" of a file that is not
  /// ours.
  const std::string& seal() const { return seal_; }
  /// Of one of the header's tensors, where there are any.
  std::string_view of(const TensorEntry& entry) const;

 private:
  using Place = std::pair<std::uint64_t, std::uint64_t>;  // begin and end

  bool any_ = false;
  std::string seal_;
  std::string digits_;         // of one after another
  std::vector<Place> places_;  // sorted; those of tensors without bytes may be there twice, and have the same hash
};

}  // namespace lockstep::checkpoint
