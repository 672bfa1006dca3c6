// Compares the command line arguments of ranks. init() warns about differences, which are seldom intended.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::job {

/// Returns the arguments in `cmdline`, which has the format of /proc/PID/cmdline (each argument ends with a zero byte),
/// without the program's name: at most 64, each truncated to 100 bytes, with control characters replaced by spaces.
/// Omits arguments that differ between ranks by design: those that contain "rank" ("--local-rank=3"), and the argument
/// after such a one if it has no "=" ("--rank 3").
std::vector<std::string> comparable_arguments(std::string_view cmdline);

/// Returns comparable_arguments() of this process.
std::vector<std::string> process_arguments();

/// Describes the first difference between `theirs` and `first`: `"--lr" "0.2" instead of "--lr" "0.1"`. Each side has
/// the argument before the difference and at most two from the difference on. Returns "" if the arguments are equal.
std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first);

}  // namespace lockstep::job
