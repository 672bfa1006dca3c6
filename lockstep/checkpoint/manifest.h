// The manifest of a checkpoint: the file that lists all others. It is written last; a directory without it is not a
// checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::checkpoint {

inline constexpr const char* kManifestName = "MANIFEST.json";

struct Manifest {
  struct File {
    std::string name;  ///< name in the checkpoint's directory
    std::uint64_t num_bytes = 0;
    std::string hash;  ///< 128-bit XXH3 of the file's bytes; for a safetensors file the hash that its header carries,
                       ///< which covers the header and the hashes of all tensors
    std::string part;  ///< the part that the file belongs to
    int rank = 0;      ///< the rank that wrote it
    bool operator==(const File&) const = default;
  };
  std::int64_t step = 0;
  int world_size = 1;   ///< number of ranks of the job that wrote it
  std::string version;  ///< version of Lockstep that wrote it
  std::vector<File> files;
  bool operator==(const Manifest&) const = default;
};

/// Returns the manifest as JSON that contains a hash of its own text.
std::string to_text(const Manifest& manifest);

/// Parses exactly the form that to_text() writes. Throws FormatError "FILE:OFFSET: reason" if a bit is flipped, a field
/// is missing, or a file name is not a plain name.
Manifest parse_manifest(std::string_view text, const std::string& file);

/// Returns whether `name` is valid as the name of a part: 1 to 64 characters of a-z, A-Z, 0-9, _ and -.
bool is_part_name(std::string_view name);
/// Returns "model.safetensors" for rank 0 and "model.3.safetensors" for rank 3. `kind` is "safetensors" or "json".
std::string part_file_name(std::string_view part, int rank, std::string_view kind);

}  // namespace lockstep::checkpoint
