// Reads and writes safetensors files: named tensors in a format that any framework reads and that contains no code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/checkpoint/files/input_file.h"
#include "lockstep/checkpoint/safetensors/safetensors_header.h"

namespace lockstep::checkpoint::inline safetensors {

using TensorMap = std::map<std::string, at::Tensor>;

struct SaveOptions {
  /// Strings that are stored with the tensors. "format" defaults to "pt", which some readers require.
  std::map<std::string, std::string> metadata = {};
};

struct ReadOptions {
  bool verify = true;  ///< whether to compare the data with the hashes, if the file has any
};

/// Writes `tensors` to `path`, which is replaced atomically (see AtomicFile): after any error it is unchanged. The file
/// also contains a hash of each tensor and one of the header (128-bit XXH3), as metadata with the prefix "lockstep.".
/// Tensors may have any strides and be on any device; they are written row-major. Tensors that share memory are written
/// once per name. Names are UTF-8 of at most 1 KiB other than "__metadata__". Memory: a copy of the largest tensor that
/// is not contiguous on the CPU. Throws UsageError for an invalid name, a dtype or a layout that the format does not
/// have, an undefined tensor, and metadata whose key begins with "lockstep."; FormatError for more tensors than the
/// reader accepts (limits.h); SystemError if the file cannot be written.
void save_tensors(const TensorMap& tensors, const std::string& path, const SaveOptions& options = {});

/// Reads all tensors of a file, newly allocated on the CPU. Throws as SafetensorsReader does.
TensorMap load_tensors(const std::string& path, const ReadOptions& options = {});

/// An open file with a validated header. Const methods are thread-safe.
class SafetensorsReader {
 public:
  /// Reads and checks the header, but no tensor. Throws SystemError if the file cannot be read and UsageError if it is
  /// not a regular file. Throws FormatError "FILE:OFFSET: reason" if it violates the format (parse_header), if its
  /// length differs from what the header says, or if its header differs from the one that save_tensors() wrote. Memory:
  /// 16 MiB in addition to the header.
  explicit SafetensorsReader(const std::string& path, const ReadOptions& options = {});

  const std::map<std::string, TensorEntry>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Returns whether the file has hashes and ReadOptions::verify is true.
  bool can_verify() const { return verify_ && hashes_.has_hashes(); }
  /// Returns the hash that covers the whole file; "" if can_verify() is false.
  const std::string& header_hash() const { return hashes_.header_hash(); }
  std::uint64_t num_bytes() const { return file_.num_bytes(); }

  /// Reads a tensor into newly allocated memory on the CPU. Throws UsageError for an unknown name. Throws FormatError,
  /// which names the tensor, if its bytes differ from those that save_tensors() wrote, if a BOOL is neither 0 nor 1,
  /// and if the file has become shorter.
  at::Tensor read(const std::string& name) const;
  /// Verifies the bytes of all tensors against their hashes without keeping them. Throws FormatError, which names the
  /// first damaged tensor. Does nothing if the file has no hashes.
  void verify() const;

 private:
  void read_verified(const std::string& name, const TensorEntry& entry, char* bytes) const;

  files::InputFile file_;
  std::uint64_t data_offset_ = 0;
  SafetensorsHeader header_;
  bool verify_;
  TensorHashes hashes_;
};

}  // namespace lockstep::checkpoint::inline safetensors
