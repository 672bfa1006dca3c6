// Runs other programs with a time limit and collects their output. Uses no shell.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::process {

struct ToolCommand {
  std::string path;               ///< path of an executable file; empty: there is no such tool, and nothing runs
  std::vector<std::string> argv;  ///< including argv[0]
  Environment environment = current_environment();
  std::string directory = {};              ///< working directory; empty: this process's
  std::chrono::milliseconds limit{10000};  ///< time limit
  std::string input = {};                  ///< content of its stdin
};

struct ToolResult {
  static constexpr int kNotRun = -1;
  static constexpr int kTimedOut = -2;  ///< it was killed at its time limit, or because `quit` was closed

  std::string path;      ///< as in the command
  int code = kNotRun;    ///< its exit code, or 128 + the signal that ended it
  std::string out, err;  ///< the first kMaxOutputBytes of each; `err` is the reason if the tool could not be started

  bool succeeded() const { return code == 0; }
  /// Returns the text for an error message: stderr, or stdout if stderr is empty.
  const std::string& message() const { return err.empty() ? out : err; }
};
inline constexpr std::size_t kMaxOutputBytes = std::size_t{32} << 10;

/// Runs all commands at once, each in a session of its own, and blocks until the last one has ended. Kills a tool at
/// its time limit, and all tools when the other end of `quit` (-1: none) is closed. When a tool ends, kills the
/// processes that it leaves in its process group. Call it from the main thread.
std::vector<ToolResult> run_tools(const std::vector<ToolCommand>& calls, int quit);
/// Runs one command as run_tools() does.
ToolResult run_tool(const ToolCommand& call);

/// Returns the path of the executable `name` in the PATH of `environment`; empty if there is none.
std::string find_tool(const std::string& name, const Environment& environment = current_environment());

}  // namespace lockstep::launcher::process
