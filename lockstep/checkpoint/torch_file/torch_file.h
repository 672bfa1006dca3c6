// Reads and writes PyTorch's own files (.pt), as torch.save() and torch.load(path, weights_only=True) do in Python, and
// reads those of torch::save() in C++.
#pragma once

#include <string>

#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint::inline torch_file {

/// Reads a file that torch.save() wrote in the format since PyTorch 1.6, as torch.load(weights_only=True) does, or an
/// archive that torch::save() wrote in C++, which becomes a Dict with `module` set. Nothing in a file is executed, and
/// everything that parse_pickle() does not accept is rejected. Tensors are newly allocated on the CPU; tensors that
/// share memory in the file share it here, and strides are kept. Reads the bytes of every storage once; with `verify`
/// compares their CRC-32. Memory: the file's storages, and at most 256 MiB for all other values (limits.h). Throws
/// SystemError if the file cannot be read, FormatError "FILE:OFFSET: reason", which names the storage if one is
/// damaged, and UsageError if `path` is not a regular file or not an archive of torch.save().
Value load_torch_file(const std::string& path, const ReadOptions& options = {});

/// Writes a file for torch.load(path, weights_only=True). The file is replaced atomically (see AtomicFile). Tensors may
/// have any strides and be on any device. Tensors that overlap in memory overlap in the file as well; if they are views
/// of a larger block, only the part that they cover is written. Strides are kept if there are no gaps between elements.
/// Dictionary keys are strings, integers, numbers, bools, None or bytes. Throws UsageError for a tensor that is
/// undefined, sparse or quantized, a string that is not UTF-8, a duplicate key, and values nested deeper than 64
/// levels; SystemError if the file cannot be written.
void save_torch_file(const Value& value, const std::string& path);

/// Returns whether the first bytes are those of a file of torch.save() rather than of save_tensors(). Throws
/// SystemError.
bool is_torch_file(const std::string& path);

/// Returns whether `path` ends with ".pt" or ".pth".
bool has_torch_extension(std::string_view path);

}  // namespace lockstep::checkpoint::inline torch_file
