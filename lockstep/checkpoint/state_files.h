// The state of one part of a training as files: its tensors as safetensors, everything else as JSON.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/stateful.h"

namespace lockstep::checkpoint {

/// What `state` takes on a disk, nearly.
std::uint64_t estimate_num_bytes(const StateDict& state);

/// Writes PART.safetensors and PART.json (of rank 0; part_file_name()) into `folder`, each brought to the disk; one
/// without values is left out, and of an empty state there is the JSON. Returns what the manifest says of them. Throws
/// as save_tensors() does, and UsageError for a string that is not UTF-8.
std::vector<Manifest::File> write_state(const StateDict& state, const std::string& folder, const std::string& part,
                                        int rank);

/// The reverse. `files` are those of one part and rank. Throws as SafetensorsReader does, and FormatError for a file
/// that is not the one that was written.
StateDict read_state(const std::string& folder, const std::vector<Manifest::File>& files);

/// The plain values of a state, and back. Numbers that are infinite or NaN are {"number": "inf"}. Throws FormatError.
std::string values_to_json(const StateDict& state);
StateDict values_from_json(std::string_view text, const std::string& file);

/// Compares every byte of a file with what was written. Throws FormatError that says what is wrong, and with which
/// tensor, and SystemError.
void verify_file(const std::string& folder, const Manifest::File& file);

}  // namespace lockstep::checkpoint
