// PyTorch's own files, .pt: what torch.save() writes in Python, and torch.load(path, weights_only=True) reads.
#pragma once

#include <string>

#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint {

/// Reads a file that torch.save() wrote, in its form since PyTorch 1.6, as far as torch.load(weights_only=True) does:
/// nothing in it is executed, and what is not on the list of parse_pickle() is refused. Tensors are new on the CPU;
/// those that share memory in the file do so here, and strides are as they were. Reads the bytes of every storage once;
/// with `verify` their CRC-32 is compared. Memory: the file's storages, and at most 256 MiB for all other values
/// (limits.h). Throws SystemError when the file cannot be read, FormatError "FILE:OFFSET: reason" that names the
/// storage when it is damaged, and UsageError for something that is no file or no archive of torch.save(): one of
/// torch::save() in C++ is another format.
Value load_torch_file(const std::string& path, const ReadOptions& options = {});

/// Writes what torch.load(path, weights_only=True) reads. The file is exchanged for the new one in one step (see
/// AtomicFile). Tensors may have any strides and be on any device; those that overlap in memory do so in the file, and
/// of a larger block no more is written than they cover. Strides stay where there are no gaps between elements. Keys of
/// dictionaries are strings, integers, numbers, bools, None and bytes. Throws UsageError for a tensor that is
/// undefined, sparse or quantised, for a string that is not UTF-8, a key that is there twice, and values deeper than 64
/// levels; SystemError when the file cannot be written.
void save_torch_file(const Value& value, const std::string& path);

/// Whether a file begins as an archive does: it is one of save_torch_file() rather than of save_tensors(). Throws
/// SystemError.
bool is_torch_file(const std::string& path);

/// Whether a file of this name is to be one: it ends with ".pt" or ".pth".
bool has_torch_extension(std::string_view path);

}  // namespace lockstep::checkpoint
