// Tensors by name in a file: the format safetensors, which any framework reads and which holds no code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/checkpoint/files/input_file.h"
#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/safetensors/tensor_hashes.h"

namespace lockstep::checkpoint {

using TensorMap = std::map<std::string, at::Tensor>;

struct SaveOptions {
  /// Strings beside the tensors. "format" is "pt" when it is not set: some readers ask for it.
  std::map<std::string, std::string> metadata = {};
};

struct ReadOptions {
  bool verify = true;  ///< of files that say so, compare what is read with the hashes that they carry
};

/// Writes `tensors` to `path`, which is exchanged for the new file in one step (see AtomicFile): after any error it is
/// as it was. Beside them the file has a hash of each tensor and one of the header (XXH3 of 128 bits), as metadata
/// "lockstep....". Strides and devices do not matter: what is written is row-major. Tensors that share memory are
/// written once for each name. Names are UTF-8 of at most 1 KiB and not "__metadata__". Memory: a copy of the largest
/// tensor that is not contiguous on the CPU. Throws UsageError for a name, a dtype or a layout that the format does not
/// have, or an undefined tensor, or metadata whose key begins with "lockstep.", FormatError for more names than the
/// reader takes (limits.h), SystemError when the file cannot be written.
void save_tensors(const TensorMap& tensors, const std::string& path, const SaveOptions& options = {});

/// All tensors of a file, new on the CPU. Throws as SafetensorsReader does.
TensorMap load_tensors(const std::string& path, const ReadOptions& options = {});

/// An open file whose header has been checked.
class SafetensorsReader {
 public:
  /// Throws SystemError when the file cannot be read, UsageError when it is no regular file, and FormatError
  /// "FILE:OFFSET: reason" when it breaks the format (parse_header), is not as long as its header says, or its header
  /// is not the one that save_tensors() wrote. No tensor is read. Memory: 16 MiB beside the header.
  explicit SafetensorsReader(const std::string& path, const ReadOptions& options = {});

  const std::map<std::string, TensorEntry>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Whether the file carries hashes, and they are compared.
  bool can_verify() const { return verify_ && hashes_.has_hashes(); }
  /// One hash that stands for all of the file; "" when it does not verify.
  const std::string& header_hash() const { return hashes_.header_hash(); }
  std::uint64_t num_bytes() const { return file_.num_bytes(); }

  /// Reads a tensor into new memory on the CPU. UsageError for a name that is not there; FormatError that names the
  /// tensor when its bytes are not those that save_tensors() wrote, for a BOOL that is neither 0 nor 1, and when the
  /// file has become shorter meanwhile.
  at::Tensor read(const std::string& name) const;
  /// Compares the bytes of all tensors with their hashes, without keeping them. Throws FormatError that names the first
  /// one that is damaged. A file that has no hashes is not looked at.
  void verify() const;

 private:
  void check_hash(const std::string& name, const TensorEntry& entry, const std::string& actual) const;
  void read_verified(const std::string& name, const TensorEntry& entry, char* bytes) const;

  InputFile file_;
  std::uint64_t data_offset_ = 0;
  SafetensorsHeader header_;
  bool verify_;
  TensorHashes hashes_;
};

}  // namespace lockstep::checkpoint
