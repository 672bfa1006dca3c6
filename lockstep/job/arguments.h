// What a rank was started with: ranks that differ in it are pointed out, for it is seldom meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::job {

/// The words after the program's name in `cmdline`, as /proc/PID/cmdline has them (each ends with a zero byte), at most
/// 64, each cut to 100 bytes and with spaces for control characters. Left out is what differs rightly: a word that has
/// "rank" in it ("--local-rank=3"), and the one after it where it has no
/// "=" ("--rank 3").
std::vector<std::string> comparable_arguments(std::string_view cmdline);

/// Those of this process.
std::vector<std::string> process_arguments();

/// Where `theirs` first differ from `first`: `"--lr" "0.2" against "--lr" "0.1"`, of each side the word before it and
/// at most two from there on; "" when they are equal.
std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first);

}  // namespace lockstep::job
