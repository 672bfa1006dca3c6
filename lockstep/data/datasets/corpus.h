// Reads a text from a file or from all files below a directory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data::inline datasets {

struct CorpusOptions {
  std::vector<std::string> extensions = {};  ///< file name extensions to read in a directory, such as ".h"; empty: all
  std::uint64_t max_bytes = std::uint64_t{64} << 20;  ///< limit for the whole text, at least 1; the rest is not read
};

/// Returns the bytes of the file `path`, or of all regular files below the directory `path`, concatenated in the byte
/// order of their paths, which is the same on every machine. Links inside the directory are not followed. Throws
/// UsageError if the path does not exist, contains no matching file or no text, and SystemError if a file cannot be
/// read.
std::string read_corpus(const std::string& path, const CorpusOptions& options = {});

}  // namespace lockstep::data::inline datasets
