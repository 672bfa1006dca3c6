#include "lockstep/launch/supervise/agent_verdict.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::supervise {
namespace {

using base::Cause;
using namespace std::chrono_literals;

constexpr int kSshFailed = 255;

std::string unreachable_hint() {
  return "its ranks end by themselves within " + std::to_string(unreachable_exit_time() / 1s) + " s";
}

std::string ended(const protocol::RankExit& end) { return (end.signal != 0 ? "was " : "") + protocol::to_text(end); }

}  // namespace

std::chrono::milliseconds unreachable_exit_time() {
  return base::kUnreachableExitTime + base::net::host_timeout() - base::kPeerHostTimeout;
}

process::StartStep to_start_step(std::int64_t number) {
  for (const process::StartStep step :
       {process::StartStep::kFork, process::StartStep::kBind, process::StartStep::kExec})
    if (number == static_cast<std::int64_t>(step)) return step;
  throw base::Error(Cause::kProtocol, std::string(protocol::kProtocolSubject) + ": start step " +
                                          std::to_string(number) + "; expected 0 to 2");
}

Verdict judge_start_failure(process::StartStep step, int error, int rank, const std::string& host,
                            const std::string& program) {
  const std::string number = std::to_string(rank), why = std::string(": ") + std::strerror(error);
  const auto verdict = [&](Cause cause, const std::string& detail, const char* hint) {
    return verdict_on({.cause = cause, .rank = rank, .host = host, .detail = detail + why, .hint = hint});
  };
  switch (step) {
    case process::StartStep::kExec:
      return verdict(Cause::kBadArg, "program " + base::quoted(program, 256) + ": cannot be executed",
                     error == ENOEXEC ? "start the script with a line such as #!/bin/sh" : "");
    case process::StartStep::kBind:
      return verdict(Cause::kResource, "cannot bind the cores of rank " + number, "use --bind none");
    case process::StartStep::kFork: break;
  }
  return verdict(Cause::kResource, "cannot start rank " + number,
                 error == EAGAIN   ? "use fewer ranks, or raise ulimit -u, or pids.max of the control group"
                 : error == EMFILE ? "use fewer ranks, or raise ulimit -n"
                 : error == ENOMEM ? "use fewer ranks, or free memory on this host"
                 : error != EPERM && error != ENOSYS
                     ? ""
                     : "allow the system calls fork and memfd_create, which a profile of the container may forbid "
                       "(docker run --security-opt seccomp=...)");
}

Verdict judge_refusal(const std::string& host, const std::string& why, const std::string& hint) {
  Verdict verdict = verdict_on({.cause = Cause::kBadArg, .host = host, .detail = why, .hint = hint});
  verdict.exit_code = base::exit_code_before_start(Cause::kBadArg);
  return verdict;
}

Verdict judge_invalid_agent(const std::string& host, pid_t pid, const base::Error& error) {
  return verdict_on({.cause = error.cause(),
                     .host = host,
                     .pid = pid,
                     .detail = "the agent on host " + host + ": " + error.what(),
                     .hint = error.hint()});
}

std::chrono::milliseconds agent_silence_limit(const job::health::HealthLimits& limits) {
  return limits.stall > 0ms ? std::max<std::chrono::milliseconds>(limits.stall, base::kMinAgentSilence) : 0ms;
}

Verdict judge_silent_agent(const std::string& host, pid_t pid, std::chrono::milliseconds silence) {
  return verdict_on(
      {.cause = Cause::kInternal,
       .host = host,
       .pid = pid,
       .detail = "the agent, which monitors the ranks, has sent nothing for " + std::to_string(silence / 1s) + " s",
       .hint = "check whether it was stopped by a signal"});
}

Verdict judge_unreachable_host(const std::string& host) {
  return verdict_on(
      {.cause = Cause::kPeerUnreachable,
       .host = host,
       .detail = "host " + host + " is unreachable: no packet arrived from it for " + base::net::host_timeout_text(),
       .hint = unreachable_hint()});
}

Verdict judge_lost_agent(const LostAgent& agent) {
  const auto verdict = [&](Cause cause, const std::string& detail, const std::string& hint) {
    return verdict_on({.cause = cause, .host = agent.host, .pid = agent.end.pid, .detail = detail, .hint = hint});
  };
  const std::string text = agent.text.empty() ? "" : ": " + base::quoted(agent.text, 512);
  if (agent.via == "pod")
    return verdict(Cause::kPeerUnreachable, "the agent in pod " + agent.host + " has ended, or the pod",
                   "kubectl describe pod " + agent.host + " says why; " + unreachable_hint());
  if (agent.is_local || (agent.end.signal == 0 && agent.end.code != kSshFailed)) {
    // A guard exits with 128 and the signal that ended its agent.
    const protocol::RankExit end =
        agent.end.code > 128 ? protocol::RankExit{.signal = agent.end.code - 128} : agent.end;
    return verdict(Cause::kInternal, "the agent, which monitors the ranks, " + ended(end) + text,
                   "all ranks of this host ended with it");
  }
  return verdict(
      Cause::kPeerUnreachable,
      "the connection to the agent on host " + agent.host + " ended: " + agent.via + " " + ended(agent.end) + text,
      unreachable_hint());
}

Verdict judge_unkillable(const std::string& host, int rank, std::int64_t pid) {
  const std::string number = std::to_string(pid);
  return verdict_on({.cause = Cause::kUnkillable,
                     .rank = rank,
                     .host = host,
                     .pid = pid,
                     .detail = "process " + number + (rank >= 0 ? " of rank " + std::to_string(rank) : "") +
                               " on host " + host + " did not exit within " +
                               std::to_string(base::kUnkillableTimeout / 1s) + " s of SIGKILL",
                     .hint = "it is blocked in the kernel: see /proc/" + number + "/stack on that host"});
}

Verdict judge_user_stop(int signal, const std::string& host) {
  Verdict verdict = verdict_on({.cause = Cause::kInterrupted,
                                .host = host,
                                .pid = host == base::net::host_name() ? ::getpid() : -1,
                                .detail = signal == SIGINT    ? "stopped by Ctrl-C (SIGINT)"
                                          : signal == SIGPIPE ? "the reader of the output has closed it"
                                                              : "stopped by " + job::signal_name(signal)});
  verdict.exit_code = 128 + signal;
  verdict.is_silent = signal == SIGPIPE;  // as with `| head -1`
  return verdict;
}

Verdict judge_quit(int num_ranks, const std::string& run_dir, bool several_hosts) {
  Verdict verdict = judge_user_stop(SIGQUIT);
  for (int rank = 0; rank < num_ranks; ++rank) verdict.stacks.push_back(rank);
  verdict.fatal.hint = "the stacks of all ranks are in " + run_dir + "/stack.RANK.txt" +
                       (several_hosts ? ", on the host of each rank" : "");
  return verdict;
}

std::string stop_note(int signal, std::chrono::milliseconds grace) {
  const std::string end = base::seconds_text(grace);
  return signal == SIGINT ? "stopping all ranks: SIGINT, SIGTERM in " + base::seconds_text(grace / 2) +
                                ", and SIGKILL in " + end + "; press Ctrl-C again to kill them at once"
                          : "stopping all ranks: SIGTERM, and SIGKILL in " + end;
}

std::string foreign_library_note(const std::string& library, std::size_t num_ranks,
                                 const std::vector<std::string>& command) {
  const bool is_horovod = library == "Horovod";
  const std::string number = std::to_string(num_ranks);
  const std::string words = " " + base::joined(command, " ");
  return "warning: the ranks use " + std::string(is_horovod ? "Horovod" : "mpi4py") + ", for which they are " + number +
         " separate worlds of one rank, because lockstep run does not start " + (is_horovod ? "it" : "MPI") + "; use " +
         (is_horovod ? "horovodrun -np " : "mpirun -n ") + number + base::telemetry::printable(words.substr(0, 200));
}

std::string left_behind_note(int rank, const std::string& processes, std::chrono::milliseconds fail_grace) {
  return "warning: rank " + std::to_string(rank) +
         " ended while these processes of it still ran: " + base::telemetry::printable(processes) +
         "; they get SIGTERM now, and SIGKILL in " + base::seconds_text(fail_grace) +
         " (--fail-grace). Let the rank wait for them; setsid() does not detach them";
}

Verdict judge_preemption(const protocol::RankExit& first, const std::string& host,
                         const std::vector<base::telemetry::RankSnapshot>& ranks) {
  Verdict verdict = verdict_on({.cause = Cause::kPreempted,
                                .rank = first.rank,
                                .host = host,
                                .pid = first.pid,
                                .hint = "start the same command again"});
  add_step_and_operation(verdict.fatal, ranks);
  verdict.fatal.op.clear();
  verdict.fatal.detail = "all ranks exited together because one of them was asked to stop (SIGTERM or SIGUSR1)";
  return verdict;
}

}  // namespace lockstep::launcher::supervise
