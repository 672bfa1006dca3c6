// Verdicts on failures outside the ranks' programs: of a start, of an agent or its host, and on stops by the user. Pure
// but for base::net::host_timeout() and, in judge_user_stop(), this host's name and pid.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/launch/process/spawn.h"
#include "lockstep/launch/protocol/rank_exit.h"
#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher::supervise {

/// Returns the step with the number that an agent has sent in kStartFailed. Throws Error kProtocol for another number.
process::StartStep to_start_step(std::int64_t number);

Verdict judge_start_failure(process::StartStep step, int error, int rank, const std::string& host,
                            const std::string& program);

Verdict judge_refusal(const std::string& host, const std::string& why, const std::string& hint);
/// Returns the verdict on an agent that has sent something invalid, which reading reported as `error`.
Verdict judge_invalid_agent(const std::string& host, pid_t pid, const base::Error& error);

/// Returns the longest time in which an agent may send nothing; 0 means no limit.
std::chrono::milliseconds agent_silence_limit(const job::health::HealthLimits& limits);
Verdict judge_silent_agent(const std::string& host, pid_t pid, std::chrono::milliseconds silence);

/// Returns the time within which the ranks of an unreachable host have ended.
std::chrono::milliseconds unreachable_exit_time();
/// Returns the verdict on a host to which the connection has timed out after base::net::host_timeout().
Verdict judge_unreachable_host(const std::string& host);

/// An agent whose output has ended before its last frame.
struct LostAgent {
  std::string host;
  bool is_local = true;    ///< it ran on the launcher's host, without ssh or srun
  std::string via;         ///< as in AgentLink
  protocol::RankExit end;  ///< how its process, or ssh or srun, ended
  std::string text;        ///< stderr of ssh or srun
};
/// Returns the verdict on a lost agent. It was killed, or its host is unreachable.
Verdict judge_lost_agent(const LostAgent& agent);

/// Returns the verdict on a process that SIGKILL did not end. `rank` is -1 if it is not that of a rank.
Verdict judge_unkillable(const std::string& host, int rank, std::int64_t pid);

/// Returns the verdict on a job that a user has stopped with `signal` to lockstep run on `host`.
Verdict judge_user_stop(int signal, const std::string& host = base::net::host_name());
/// Returns the note about what now happens to the ranks.
std::string stop_note(int signal, std::chrono::milliseconds grace);

/// Returns the verdict on a job whose ranks all exited together after a stop request. `first` is the first exit.
Verdict judge_preemption(const protocol::RankExit& first, const std::string& host,
                         const std::vector<base::telemetry::RankSnapshot>& ranks);

/// Returns the verdict on a job that Ctrl-\ (SIGQUIT) has stopped, with the stacks of all ranks.
Verdict judge_quit(int num_ranks, const std::string& run_dir, bool several_hosts);

/// Returns the warning that ranks use `library`, "mpi4py" or "Horovod", in which each of them is alone.
std::string foreign_library_note(const std::string& library, std::size_t num_ranks,
                                 const std::vector<std::string>& command);

/// Returns the warning that `rank` has ended before `processes`, which it had started and which are now ended.
std::string left_behind_note(int rank, const std::string& processes, std::chrono::milliseconds fail_grace);

}  // namespace lockstep::launcher::supervise
