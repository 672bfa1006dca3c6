// Tensors by name in a file: the format safetensors, which any framework reads and which holds no code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/safetensors_header.h"

namespace lockstep::checkpoint {

using TensorMap = std::map<std::string, at::Tensor>;

struct SaveOptions {
  /// Strings beside the tensors. "format" is "pt" when it is not set: some readers ask for it.
  std::map<std::string, std::string> metadata = {};
};

/// Writes `tensors` to `path`, which is exchanged for the new file in one step (see AtomicFile): after any error it is as
/// it was. Strides and devices do not matter: what is written is row-major. Tensors that share memory are written once for
/// each name. Names are UTF-8 of at most 1 KiB and not "__metadata__". Memory: a copy of the largest tensor that is not
/// contiguous on the CPU. Throws UsageError for a name, a dtype or a layout that the format does not have, or an undefined
/// tensor, FormatError for more names than the reader takes (limits.h), SystemError when the file cannot be written.
void save_tensors(const TensorMap& tensors, const std::string& path, const SaveOptions& options = {});

/// All tensors of a file, new on the CPU. Throws as SafetensorsReader does.
TensorMap load_tensors(const std::string& path);

/// An open file whose header has been checked.
class SafetensorsReader {
 public:
  /// Throws SystemError when the file cannot be read, UsageError when it is no regular file, and FormatError
  /// "FILE:OFFSET: reason" when it breaks the format (parse_header) or is not as long as its header says. No tensor is read.
  explicit SafetensorsReader(const std::string& path);

  const std::map<std::string, TensorEntry>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  /// Reads a tensor into new memory on the CPU. UsageError for a name that is not there; FormatError for a BOOL that is
  /// neither 0 nor 1, and when the file has become shorter meanwhile.
  at::Tensor read(const std::string& name) const;

 private:
  void read_at(std::uint64_t offset, void* data, std::uint64_t num_bytes) const;

  std::string path_;
  base::Fd file_;
  std::uint64_t data_offset_ = 0;
  SafetensorsHeader header_;
};

}  // namespace lockstep::checkpoint
