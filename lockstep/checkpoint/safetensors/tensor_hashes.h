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
inline constexpr std::string_view kMetadataPrefix = "lockstep.";

/// How the text of a header begins whose metadata are `hashes` (32 digits each; any others of the right number until
/// they are known), and then the strings of others.
std::string header_prefix(const std::vector<std::string>& hashes);
/// Puts the header's own hash where header_prefix() has left room.
void embed_header_hash(std::string& text);

/// The hashes of a file's tensors; small, since a header may describe 50,000 of them.
class TensorHashes {
 public:
  /// Of a file that is not ours.
  TensorHashes() = default;
  /// Our keys go from `header.metadata`. Throws FormatError when `text`, which `header` was read from, is not what was
  /// written.
  TensorHashes(std::string_view text, SafetensorsHeader& header, const std::string& file);

  bool has_hashes() const { return has_hashes_; }
  /// The header's own hash: since it covers those of all tensors it stands for the whole file. "" of a file that is not
  /// ours.
  const std::string& header_hash() const { return header_hash_; }
  /// Of one of the header's tensors, where there are any.
  std::string_view hash_of(const TensorEntry& entry) const;

 private:
  using ByteRange = std::pair<std::uint64_t, std::uint64_t>;  // begin and end

  bool has_hashes_ = false;
  std::string header_hash_;
  std::string hashes_;  // of one after another
  std::vector<ByteRange>
      byte_ranges_;  // sorted; those of tensors without bytes may be there twice, and have the same hash
};

}  // namespace lockstep::checkpoint
