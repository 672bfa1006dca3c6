// Reads the command line of this process, and compares the arguments of ranks. init() warns about differences, which
// are seldom intended.
#pragma once

#include <string>
#include <vector>

namespace lockstep::job {

/// Returns the arguments of this process, beginning with the program's name. Returns none if the kernel does not
/// provide them.
std::vector<std::string> own_arguments();

/// Returns the arguments in `command_line`, which begins with the program's name, without that name: at most 64, each
/// truncated to 100 bytes, with control characters replaced by spaces. Omits arguments that differ between ranks by
/// design: those that contain "rank" ("--local-rank=3"), and the argument after such a one if it has no "="
/// ("--rank 3").
std::vector<std::string> comparable_arguments(std::vector<std::string> command_line);

/// Describes the first difference between `theirs` and `first`: `"--lr" "0.2" instead of "--lr" "0.1"`. Each side has
/// the argument before the difference and at most two from the difference on. Returns "" if the arguments are equal.
std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first);

}  // namespace lockstep::job
