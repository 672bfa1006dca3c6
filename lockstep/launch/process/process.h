// Starts processes that cannot outlive this one. Finds and kills the processes that they leave behind.
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

/// The process of an agent, or the ssh or srun that starts one. It has a session of its own, so that Ctrl-C in the
/// terminal does not signal it. Its input ends when this process dies.
struct AgentProcess {
  pid_t pid = -1;
  base::Fd to;    ///< its stdin
  base::Fd from;  ///< its stdout
  base::Fd err;   ///< for ssh and srun: an unnamed file that receives their stderr
};

/// Starts `path` with `argv`, `environment` and the soft limit `max_files` for descriptors. Set `is_remote` for ssh and
/// srun: their stderr goes to AgentProcess::err and is not printed, and the kernel kills them when the calling thread,
/// which must be the main thread, ends. Throws SystemError.
AgentProcess spawn_agent(const std::string& path, const std::vector<std::string>& argv, const Environment& environment,
                         bool is_remote, std::uint64_t max_files);

/// The step in which the start of a rank failed.
enum class StartStep : std::int32_t { kFork, kBind, kExec };

/// The report of a child of spawn_rank() that could not start its program. The child writes it to its failure pipe with
/// one write(), so a reader gets all of it or nothing.
struct StartFailure {
  std::int32_t rank = -1;
  StartStep step = StartStep::kFork;
  std::int32_t error = 0;
};

/// The descriptors for a rank: its standard streams, its page, and the pipe for its StartFailure. Not owned.
struct RankStreams {
  int in = -1;
  int out = -1;
  int err = -1;
  int failure = -1;
  int page = -1;  ///< from base::create_rank_page(); the rank inherits this number, which is in LOCKSTEP_PAGE
  std::uint64_t max_files = 0;  ///< soft limit of the rank's descriptors
};

/// Starts one rank and returns its pid. The rank leads a new session and process group, runs on its CPUs with default
/// signal handling, and has only the descriptors 0, 1, 2 and that of its page. The kernel kills it when the calling
/// thread, which must be the main thread, ends. Throws SystemError if fork() fails; later failures are written to
/// streams.failure.
pid_t spawn_rank(const JobPlan& job, const RankPlan& rank, const RankStreams& streams);

/// The descriptors for stdin, stdout and stderr of a tool. Not owned.
struct ToolStreams {
  int in, out, err;
};

/// Starts `path` with `arguments` and `environment` in `directory` (empty: this process's) and returns its pid. The
/// tool leads a new session, and the kernel kills it when the calling thread ends. Throws SystemError if fork() fails;
/// a later failure ends the tool with exit code 127.
pid_t spawn_tool(const std::string& path, const std::vector<std::string>& arguments, const Environment& environment,
                 const std::string& directory, const ToolStreams& streams);

/// Returns the environment of this process.
Environment current_environment();

/// Makes this process the parent of all its descendants that become orphans after this call.
void become_subreaper();

/// Blocks all signals except those of faults, and returns a descriptor that delivers `signals`. Call it before any
/// thread is started. Throws SystemError.
base::Fd make_signal_fd(const std::vector<int>& signals);
/// Reads the next pending signal from that descriptor. Does not block; returns nullopt if there is none.
std::optional<int> read_signal(int fd);

/// A child that has been reaped.
struct ReapedChild {
  pid_t pid = 0;  ///< 0: there are children, but none has ended
  int status = 0;
};
/// Reaps one child that has ended. Does not block. Returns nullopt if there are no children at all.
std::optional<ReapedChild> try_reap();

/// Opens /dev/null for each closed descriptor among 0, 1 and 2, so that no other file gets these numbers.
void open_standard_descriptors();

/// Returns whether this process has a child, including one that has ended.
bool has_children();

/// Returns the current descendants of this process according to /proc, including zombies.
std::vector<pid_t> descendants();

/// Sends SIGKILL to all descendants except `spared` and their descendants, and reaps them. Repeats this until none is
/// left or the deadline expires. Returns the processes that are left.
std::vector<pid_t> kill_descendants(const std::vector<pid_t>& spared, base::Deadline deadline);

}  // namespace lockstep::launcher
