// Injects file system faults: replaces the functions of libc with which this process writes files.
#pragma once

#include <string>
#include <vector>

namespace lockstep::tests {

/// From now on, counts calls of openat, pwrite, fsync, renameat and mkdirat, starting at 0, and makes call number
/// `number` fail with `error`. If `error` is 0, that call kills the process with SIGKILL instead.
void fail_file_operation(int number, int error);

/// Counts the calls without failures and records them for file_operations(): "openat PATH", "pwrite PATH",
/// "fsync PATH", "renameat FROM TO", "mkdirat PATH".
void record_file_operations();

/// Stops counting. Returns the number of calls.
int end_file_operations();
/// Returns the recorded calls.
std::vector<std::string> file_operations();

}  // namespace lockstep::tests
