// The environment of processes that are started.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::process {

/// Environment variables in the form of execve(2): "NAME=value".
using Environment = std::vector<std::string>;

Environment current_environment();

/// Returns the name of a variable "NAME=value".
std::string_view variable_name(std::string_view variable);

/// Returns the value of the variable `name`, which points into `environment`; nullopt if it is not set.
std::optional<std::string_view> find_variable(const Environment& environment, std::string_view name);

/// Returns the variables of `own` and `added`; those of `added` take precedence. Omits variables of `own` for which
/// belongs_to_another_launcher() is true.
Environment merge_environment(const Environment& own, const Environment& added);

/// Returns `environment` without the variables that `others` has, because their values differ between ranks.
Environment remove_variables(Environment environment, const Environment& others);

/// Returns the current directory. If it has been deleted, returns `otherwise` if that is an absolute path, and throws
/// UsageError if not.
std::string current_directory(const std::string& otherwise = {});

/// Returns whether an outer launcher (torchrun, SLURM, PMI) describes, with this variable, the process that it started.
/// Such a variable does not apply to the ranks that Lockstep starts.
bool belongs_to_another_launcher(std::string_view name);

}  // namespace lockstep::launcher::process
