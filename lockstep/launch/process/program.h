// Finding a program as a shell would.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// The path of the executable file that `name` means: `name` itself when it has a slash, else the first one in the
/// folders of `search_path` (the value of PATH). Throws UsageError saying what is wrong: not found, a folder, not
/// executable.
std::string find_program(const std::string& name, std::string_view search_path);

/// The whole content of a text file, at most 1 MiB. Throws UsageError that names `what`, the file and what is wrong.
std::string read_option_file(const char* what, const std::string& file);

/// True when `path` is a file that this process may execute.
bool is_executable(const std::string& path);

/// The path of the running program.
std::string executable_path();

/// Becomes the program `name` that was installed with this one, with these arguments. Does not return. Throws
/// UsageError when it is not there, SystemError when the system does not start it.
[[noreturn]] void exec_companion(const std::string& name, const std::vector<std::string>& words);

}  // namespace lockstep::launcher
