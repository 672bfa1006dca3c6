// Finds executable files as a shell does.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::process {

/// Returns the path of the program `name`: `name` itself if it contains a slash, else the first executable file of that
/// name in the directories of `search_path` (the value of PATH). Throws UsageError with the reason: not found, not a
/// file, or not executable.
std::string find_program(const std::string& name, std::string_view search_path);

/// Checks that the system can execute the program at `path`: that it is an executable file, for the architecture of
/// this host, and that the interpreter in its first line (#!) exists. Throws UsageError with the reason.
void check_startable(const std::string& path);

/// The directories in which programs are looked up if PATH is not set.
inline constexpr const char* kDefaultSearchPath = "/usr/local/bin:/usr/bin:/bin";

/// Returns the words after "#!" in the first line of a file that begins with `head`; none if it does not begin with
/// "#!". Pure.
std::vector<std::string> shebang_words(const std::string& head);

/// Returns the first `most` bytes of a file; "" if it cannot be read: a file may be executable, but not readable.
std::string read_head(const std::string& path, std::size_t most);

/// Returns whether `path` is a regular file that this process may execute.
bool is_executable(const std::string& path);

/// Returns the path of the running program. Throws SystemError.
std::string executable_path();

/// Returns the first file below `folder` that matches a pattern of glob(7), in which the folder's own characters stand
/// for themselves; empty if there is none.
std::string first_match(const std::string& folder, const std::string& pattern);

/// Returns the folder of the CMake package that was installed with `program`, by cmake --install or in a wheel. Throws
/// UsageError if there is none: in a build folder, for example.
std::string cmake_package_folder(const std::string& program);

/// Replaces this process by the program `name` in the directory of the running program. Does not return. Throws
/// UsageError if there is no such program, and SystemError if the system cannot execute it.
[[noreturn]] void exec_companion(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace lockstep::launcher::process
