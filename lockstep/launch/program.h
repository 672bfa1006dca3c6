// Finding a program as a shell would.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::launcher {

/// The path of the executable file that `name` means: `name` itself when it has a slash, else the first one in the folders
/// of `search_path` (the value of PATH). Throws UsageError saying what is wrong: not found, a folder, not executable.
std::string find_program(const std::string& name, std::string_view search_path);

/// True when `path` is a file that this process may execute.
bool is_executable(const std::string& path);

/// The path of the running program.
std::string own_path();

}  // namespace lockstep::launcher
