// The dtypes of safetensors, the header of a file, parsed from an untrusted source, and the hashes in it. Needs headers
// of torch only.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::checkpoint::inline safetensors {

struct SafetensorsDtype {
  std::string_view name;  ///< "F32"
  c10::ScalarType type;
  std::uint64_t num_bytes;  ///< size of one element
};

/// Returns the dtype with that name or type, or null.
const SafetensorsDtype* find_dtype(std::string_view name);
const SafetensorsDtype* find_dtype(c10::ScalarType type);

/// Returns "F64, F32, ...", for error messages.
std::string dtype_names();

/// A tensor of the file: bytes [begin, end) of the data that follow the header.
struct TensorEntry {
  const SafetensorsDtype* dtype = nullptr;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;  ///< the entries of the key "__metadata__"
};

/// The offset of the header's text, which follows its length as a little-endian u64.
inline constexpr std::uint64_t kHeaderOffset = 8;

/// Parses the header's text, which `num_data_bytes` bytes of tensors follow. Checks everything: the limits of limits.h,
/// JSON without duplicate keys, names of valid UTF-8, only the fields and dtypes of the format, shapes whose product
/// matches the number of bytes, and tensors that cover the data without a gap or an overlap. Throws FormatError
/// "FILE:OFFSET: reason"; the offset is in the file, at or just after the error. Allocates at most 16 MiB in addition
/// to the text.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t num_data_bytes, const std::string& file);

/// Files are hashed in pieces of this size, while a piece that was read or is about to be written is in cache.
constexpr std::uint64_t kHashChunkBytes = std::uint64_t{1} << 20;

/// The prefix of Lockstep's metadata keys: "lockstep.header", and "lockstep.tensors.0", ".1" ..., which hold the
/// tensors' hashes in the order of their bytes in the file. There are two kinds of keys, so that a file with a flipped
/// bit in one key does not pass as a file without hashes.
inline constexpr std::string_view kMetadataPrefix = "lockstep.";

/// Returns the beginning of the text of a header with these tensor hashes, up to and including the last hash. The
/// hashes have 32 digits each; pass the same number of placeholders while the hashes are not known.
std::string header_prefix(const std::vector<std::string>& hashes);
/// Replaces the placeholder that header_prefix() wrote by the hash of the header.
void embed_header_hash(std::string& text);

/// The hashes of a file's tensors. Compact, because a header may describe 50,000 tensors.
class TensorHashes {
 public:
  /// No hashes: for a file that Lockstep did not write.
  TensorHashes() = default;
  /// Moves Lockstep's keys out of `header.metadata`. `text` is the text that `header` was parsed from. Throws
  /// FormatError if it differs from what was written.
  TensorHashes(std::string_view text, SafetensorsHeader& header, const std::string& file);

  bool has_hashes() const { return has_hashes_; }
  /// The hash of the header, which identifies the whole file because it covers the hashes of all tensors. "" if the
  /// file has no hashes.
  const std::string& header_hash() const { return header_hash_; }
  /// Returns the hash of one of the header's tensors; requires has_hashes().
  std::string_view hash_of(const TensorEntry& entry) const;

 private:
  using ByteRange = std::pair<std::uint64_t, std::uint64_t>;  // begin and end

  bool has_hashes_ = false;
  std::string header_hash_;
  std::string hashes_;                  // the tensors' hashes, concatenated
  std::vector<ByteRange> byte_ranges_;  // sorted; empty tensors may have equal ranges, and then equal hashes
};

}  // namespace lockstep::checkpoint::inline safetensors
