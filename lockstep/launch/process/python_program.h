// Python programs: interpreters, scripts, and the hook with which Lockstep watches them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::launcher::process {

/// Returns whether `program`, a name or a path, is an interpreter of Python by its name. Pure.
bool is_python(const std::string& program);

/// Returns whether the file `program` is an interpreter of Python by its name, or a script whose first line names one.
bool runs_python(const std::string& program);

/// Returns which word of `command` is a Python script: the program, if it is a path that ends with .py, or the first
/// argument of an interpreter that is not an option. Returns nullopt for other programs, and for -c and -m. Pure.
std::optional<std::size_t> python_script_index(const std::vector<std::string>& command);

inline constexpr const char* kPythonHook = "_lockstep_hook";  ///< the folder of the hook, a package of Python

/// Returns the path of the folder kPythonHook that is installed with this program; empty if it is not.
std::string python_hook_folder();

/// Returns whether `program`, an interpreter or a script beside one, is in an environment in which the package is
/// installed, which has the hook.
bool has_installed_hook(const std::string& program);

/// Replaces this process by `python`, a name or a path, that compiles the extension of the package which it has. Empty:
/// the python3 in the directory of the running program, else the one in PATH. Does not return. Throws UsageError if
/// there is no such program, and SystemError if the system cannot execute it.
[[noreturn]] void exec_extension_build(std::string python);

}  // namespace lockstep::launcher::process
