// Directories that are safe to write checkpoints to.
#pragma once

#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint::files {

/// Prefix of the names of files and directories that are incomplete or were left by a killed process.
inline constexpr const char* kTempPrefix = ".lockstep-tmp-";

/// Returns kTempPrefix followed by 16 random hexadecimal digits.
std::string make_temp_name();

/// Opens a directory in order to write `what`. Throws SystemError if it cannot be opened, and UsageError if it is
/// world-writable without the sticky bit: other users could replace the files.
base::Fd open_directory(const std::string& folder, const std::string& what);

/// Flushes the entries of a directory to disk. Throws SystemError.
void sync_directory(const base::Fd& folder, const std::string& what);

/// Creates a directory and its parents and flushes them to disk. Does nothing if the directory exists. Throws
/// SystemError.
void create_directories(const std::string& folder);

}  // namespace lockstep::checkpoint::files
