// Folders that what is written into them can be trusted to.
#pragma once

#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint {

/// Names that begin so are of what is not whole yet, or was left by a process that was killed.
inline constexpr const char* kTempPrefix = ".lockstep-tmp-";

/// kTempPrefix and 16 random digits.
std::string make_temp_name();

/// Opens a folder. Throws SystemError "cannot open the folder of `what`", and UsageError when it is writable for
/// everybody and has no sticky bit: there others could exchange what was written.
base::Fd open_directory(const std::string& folder, const std::string& what);

/// Waits until the disk has the names in it. Throws SystemError.
void sync_directory(const base::Fd& folder, const std::string& what);

/// Makes a folder, and those above it, and waits until the disk has them. Nothing where there is one. Throws
/// SystemError.
void create_directories(const std::string& folder);

}  // namespace lockstep::checkpoint
