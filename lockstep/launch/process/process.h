// Starting processes so that they cannot outlive us, and ending what is left of them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/job_plan.h"

namespace lockstep::launcher {

/// The agent, or the ssh that has started it: a process in a session of its own, so that the terminal's Ctrl-C does not
/// reach it. It sees the end of its input when this process dies.
struct AgentProcess {
  pid_t pid = -1;
  base::Fd to;    ///< its stdin
  base::Fd from;  ///< its stdout
  base::Fd err;   ///< of ssh: a file without a name that has what it wrote to stderr
};

/// Starts `path` with the words of `argv` and this environment, with this soft limit of descriptors. `between`: it is
/// ssh or srun, so what it writes to stderr is kept for us, and not shown, and it ends with the calling thread, which
/// must be the main one. Throws SystemError.
AgentProcess spawn_agent(const std::string& path, const std::vector<std::string>& argv, const Environment& environment,
                         bool is_remote, std::uint64_t max_files);

/// What the child of spawn_rank() was doing when it could not go on.
enum class StartStep : std::int32_t { kFork, kBind, kExec };

/// Written by such a child to its failure pipe; one write, so it arrives whole.
struct StartFailure {
  std::int32_t rank = -1;
  StartStep step = StartStep::kFork;
  std::int32_t error = 0;
};

/// Where a rank's descriptors 0, 1 and 2 and its failure report go; borrowed.
struct RankStreams {
  int in = -1;
  int out = -1;
  int err = -1;
  int failure = -1;
  int page = -1;  ///< of base::create_rank_page(); the rank gets it under the same number, in LOCKSTEP_PAGE
  std::uint64_t max_files = 0;  ///< soft limit of descriptors that the rank gets
};

/// Starts one rank: leader of a new session and process group, killed by the kernel when the calling thread (which must
/// be the main one) ends, bound to its CPUs, with default signal handling and no descriptor but 0, 1, 2 and its page.
/// Throws SystemError when it cannot fork; what fails later is written to streams.failure.
pid_t spawn_rank(const JobPlan& job, const RankPlan& rank, const RankStreams& streams);

/// Descriptors of a tool's stdin, stdout and stderr.
struct ToolStreams {
  int in, out, err;
};

/// Starts `path` with these arguments and this environment, in this directory (empty: this process's), as leader of a
/// session, killed by the kernel when the calling thread ends. Throws SystemError when it cannot fork; what fails later
/// is exit code 127.
pid_t spawn_tool(const std::string& path, const std::vector<std::string>& arguments, const Environment& environment,
                 const std::string& directory, const ToolStreams& streams);

/// The environment of this process.
Environment current_environment();

/// From here on, orphans among our descendants become our children.
void become_subreaper();

/// Blocks all signals but those of faults; to be called before threads exist. Returns a descriptor that reads
/// `signals`.
base::Fd make_signal_fd(const std::vector<int>& signals);
/// The next signal waiting at it.
std::optional<int> read_signal(int fd);

/// A child that was waited for.
struct ReapedChild {
  pid_t pid = 0;  ///< 0: there are children, but none has ended
  int status = 0;
};
/// Waits for one ended child without blocking; nothing when there are no children at all.
std::optional<ReapedChild> try_reap();

/// Opens /dev/null for each of the descriptors 0, 1 and 2 that is closed, so that nothing else gets these numbers.
void open_standard_descriptors();

/// True when this process has a child, ended ones included.
bool has_children();

/// Processes below this one, zombies too, as /proc shows them now.
std::vector<pid_t> descendants();

/// SIGKILL to all descendants but those in `spared` and below them, again until none is left, reaping them. What is
/// left at the deadline is returned.
std::vector<pid_t> kill_descendants(const std::vector<pid_t>& spared, base::Deadline deadline);

}  // namespace lockstep::launcher
