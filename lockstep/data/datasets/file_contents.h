// The bytes of a file.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::data {

/// Appends them to `text`, which ends at `max_bytes`, at least as many as it has; what is beyond is left out. Throws
/// SystemError when the file cannot be read, and UsageError when it is no regular one.
void append_file_contents(const std::string& path, std::uint64_t max_bytes, std::string& text);

}  // namespace lockstep::data
