// Stores the state of one part as files: tensors as safetensors, all other values as JSON.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/stateful.h"

namespace lockstep::checkpoint {

/// Returns the approximate size of `state` on disk.
std::uint64_t estimate_num_bytes(const StateDict& state);

/// Writes PART.safetensors and PART.json into `folder` (see part_file_name() for ranks other than 0) and flushes both
/// to disk. A file without values is omitted; an empty state has the JSON file. Returns their manifest entries. Throws
/// as save_tensors() does, and UsageError for a string that is not UTF-8.
std::vector<Manifest::File> write_state(const StateDict& state, const std::string& folder, const std::string& part,
                                        int rank);

/// Reads what write_state() wrote; `files` are the files of one part and rank. Throws as SafetensorsReader does, and
/// FormatError for a file that is not the one that was written.
StateDict read_state(const std::string& folder, const std::vector<Manifest::File>& files);

/// Converts all values of a state except tensors to JSON, and back. Infinities and NaN are written as {"number":
/// "inf"}. Throws UsageError for names and strings that are not UTF-8, and FormatError for invalid JSON.
std::string values_to_json(const StateDict& state);
StateDict values_from_json(std::string_view text, const std::string& file);

/// Verifies every byte of a file against its hash. Throws FormatError, which describes the damage and names the tensor,
/// and SystemError.
void verify_file(const std::string& folder, const Manifest::File& file);

}  // namespace lockstep::checkpoint
