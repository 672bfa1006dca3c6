// Other programs that are asked something: found, started, heard and ended within a bound. No shell is between.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/launch/plan/job_plan.h"

namespace lockstep::launcher {

struct ToolCommand {
  std::string path;                ///< of an executable file; empty: there is none, and nothing is done
  std::vector<std::string> words;  ///< argv, from argv[0]
  Environment environment;
  std::string directory;  ///< entered first; empty: this process's
  std::chrono::milliseconds limit{10000};
  std::string input = {};  ///< at its stdin
};

/// What came of it.
struct ToolResult {
  static constexpr int kNotRun = -1;
  static constexpr int kTimedOut = -2;  ///< it was killed at its limit

  std::string path;      ///< as in the call
  int code = kNotRun;    ///< its exit code, or 128 + the signal that ended it
  std::string out, err;  ///< at most kMaxOutputBytes bytes of each; when it was not started, `err` says why

  bool succeeded() const { return code == 0; }
  /// For a message: what it complained of.
  const std::string& words() const { return err.empty() ? out : err; }
};
inline constexpr std::size_t kMaxOutputBytes = std::size_t{32} << 10;

/// Runs all of them at once, each in a session of its own, and returns when the last has ended; at its limit, or when
/// the other end of `quit` (-1: none) is closed, a tool gets SIGKILL with all that it has started in its session. Call
/// it from the main thread.
std::vector<ToolResult> run_tools(const std::vector<ToolCommand>& calls, int quit);
ToolResult run_tool(const ToolCommand& call, int quit = -1);

/// The executable file that `name` means in `environment`'s PATH; empty when there is none.
std::string find_tool(const std::string& name, const Environment& environment);

}  // namespace lockstep::launcher
