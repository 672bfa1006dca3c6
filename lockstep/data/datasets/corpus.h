// Text from a file or a folder of files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data {

struct CorpusOptions {
  std::vector<std::string> extensions = {};           ///< of files in a folder, ".h"; empty: all
  std::uint64_t max_bytes = std::uint64_t{64} << 20;  ///< of the whole text, at least 1; what is beyond is left out
};

/// The bytes of the file `path`, or of all regular files below the folder `path`, one after the other in the order of
/// their paths' bytes, which is the same on every machine. Links below a folder are not followed. Throws UsageError
/// when there is no such path, no such file in it, or no text; SystemError when a file cannot be read.
std::string read_corpus(const std::string& path, const CorpusOptions& options = {});

}  // namespace lockstep::data
