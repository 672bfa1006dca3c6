// Asking a program of the system, such as sbatch, without a shell.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

struct ToolAnswer {
  int code = 0;     ///< its exit code, or 128 + the signal that ended it
  std::string out;
  std::string err;
};

/// Starts `path` with these words as argv, this process's environment and `input` at its stdin, in a process group of its own, and waits until it has ended. At the
/// deadline it is killed, and SystemError (ETIMEDOUT) thrown; the same when the system does not start it. From any thread.
ToolAnswer call_tool(const std::string& path, const std::vector<std::string>& words, std::string_view input, base::Deadline deadline);

}  // namespace lockstep::launcher
