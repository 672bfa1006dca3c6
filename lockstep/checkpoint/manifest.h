// What a checkpoint consists of: the file that is written last, and without which there is none.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::checkpoint {

inline constexpr const char* kManifestName = "MANIFEST.json";

struct Manifest {
  struct File {
    std::string name;  ///< in the checkpoint's folder
    std::uint64_t num_bytes = 0;
    std::string hash;  ///< XXH3 of 128 bits: of the bytes, or of safetensors the one that the header carries of itself
                       ///< and of all tensors' hashes
    std::string part;  ///< what it is a file of
    int rank = 0;      ///< who wrote it
    bool operator==(const File&) const = default;
  };
  std::int64_t step = 0;
  int world_size = 1;   ///< of the job that wrote it
  std::string version;  ///< of the Lockstep that wrote it
  std::vector<File> files;
  bool operator==(const Manifest&) const = default;
};

/// JSON with a hash of itself.
std::string to_text(const Manifest& manifest);

/// Reads to_text()'s form and no other. Throws FormatError "FILE:OFFSET: reason": a bit is wrong, something is missing,
/// a file's name is not a plain one.
Manifest parse_manifest(std::string_view text, const std::string& file);

/// A part's name: 1 to 64 of a-z, A-Z, 0-9, _ and -.
bool is_part_name(std::string_view name);
/// "model.safetensors"; of ranks other than 0 "model.3.safetensors". `kind` is "safetensors" or "json".
std::string part_file_name(std::string_view part, int rank, std::string_view kind);

}  // namespace lockstep::checkpoint
