// A disk that fails when it is told to: the operations by which files are written, of the whole process, between the
// code under test and libc.
#pragma once

#include <string>
#include <vector>

namespace lockstep::tests {

/// Counts openat, pwrite, fsync, renameat and mkdirat from now on, from 0, and lets number `number` fail with `error`,
/// once; for `error` 0 the process gets SIGKILL there instead.
void fail_file_operation(int number, int error);

/// Counts and fails none. What was done since is in file_operations(): "openat PATH", "pwrite PATH", "fsync PATH",
/// "renameat FROM TO", "mkdirat PATH".
void record_file_operations();

/// From now on nothing is counted. Returns how many there were.
int end_file_operations();
std::vector<std::string> file_operations();

}  // namespace lockstep::tests
