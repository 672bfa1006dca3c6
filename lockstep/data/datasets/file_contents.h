// Reads the bytes of a file.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::data::inline datasets {

/// Appends the contents of the file `path` to `text` until `text` has `max_bytes` bytes; the rest is not read.
/// `max_bytes` must be at least text.size(). Throws SystemError if the file cannot be read, and UsageError if it is not
/// a regular file.
void append_file_contents(const std::string& path, std::uint64_t max_bytes, std::string& text);

}  // namespace lockstep::data::inline datasets
