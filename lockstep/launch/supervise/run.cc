#include "lockstep/launch/supervise/run.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/identity/pod.h"
#include "lockstep/launch/hosts/pods.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/output/last_fatal.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/environment.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/python_program.h"
#include "lockstep/launch/slurm/allocation.h"
#include "lockstep/launch/supervise/agent_verdict.h"
#include "lockstep/launch/supervise/error_texts.h"
#include "lockstep/launch/supervise/generation.h"
#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher::supervise {
namespace {

using base::Deadline;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::size_t kMaxListedHosts = 8;  // of more hosts, only the number is printed

/// Returns a name that is unique to this run: "train-20261122-091503-4711".
std::string default_run_name(const std::string& program) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char time[32];
  std::strftime(time, sizeof time, "-%Y%m%d-%H%M%S-", &local);
  return std::filesystem::path(program).filename().string() + time + std::to_string(::getpid());
}

/// Returns a random id, which all generations of a job share.
std::string random_job_id() {
  const job::Mac random = job::random_nonce();
  return base::to_hex(job::mac_bytes(random).substr(0, 16));
}

void check_min_hosts(const cli::RunOptions& options) {
  if (options.min_hosts > static_cast<int>(count_hosts(options)))
    throw base::UsageError("--min-hosts: " + std::to_string(options.min_hosts) + "; expected at most " +
                           std::to_string(count_hosts(options)) + ", the number of hosts of the job");
}

int exit_code_of(const Verdict& verdict, const cli::RunOptions& options) {
  const bool may_succeed = is_restartable(verdict) || verdict.fatal.cause == base::Cause::kPreempted;
  return options.retry_exit_code > 0 && may_succeed ? options.retry_exit_code : verdict.exit_code;
}

/// Runs the generations of a job one after another until the job ends without a restart.
class RestartLoop {
 public:
  explicit RestartLoop(const JobSpec& job)
      : job_(job),
        num_hosts_(count_hosts(job.options)),
        min_hosts_(job.options.min_hosts > 0 ? static_cast<std::size_t>(job.options.min_hosts) : num_hosts_),
        restarts_(job.options.max_restarts, job.options.restart_pause),
        backoff_(num_hosts_) {}

  int run() {
    WorldSize world;
    hosts_ = backoff_.available({});
    for (;;) {
      const auto begun = Clock::now();
      JobOutcome outcome = run_generation(job_, restarts_.num_restarts(), hosts_,
                                          restarts_.num_restarts() == 0 ? num_hosts_ : min_hosts_, world);
      const auto now = Clock::now();
      outcome.attempt.duration = std::chrono::duration_cast<std::chrono::milliseconds>(now - begun);
      const auto pause = next_pause(outcome);
      if (!pause) return finish(outcome);
      const auto next = back_off_hosts(outcome, now + *pause);
      const std::string report = outcome.failure_report + restart_text(*outcome.verdict, now, next);
      std::optional<int> signal;
      if (outcome.output)
        outcome.output->finish(report, [&] { return signal || (signal = stop_signal()); });
      else
        std::fputs(report.c_str(), stderr);
      outcome.failure_report.clear();
      outcome.verdict = signal ? signal_verdict(*signal) : wait_until(next);
      if (outcome.verdict) return finish(outcome);
      hosts_ = backoff_.available(Clock::now());
    }
  }

 private:
  /// Returns the pause before the next generation; nullopt if there is none.
  std::optional<std::chrono::milliseconds> next_pause(JobOutcome& outcome) {
    if (!outcome.verdict || outcome.is_stopped) return std::nullopt;
    const auto pause = restarts_.next(outcome.attempt, *outcome.verdict);
    if (!pause || !outcome.preempted_too_late) return pause;
    outcome.verdict = signal_verdict(SIGUSR1);
    return std::nullopt;
  }

  /// Updates the backoff of the hosts. Returns the time at which the next generation may start, which is later than
  /// `next` if too few hosts are available or an unreachable host may still have ranks.
  Clock::time_point back_off_hosts(const JobOutcome& outcome, Clock::time_point next) {
    const auto now = Clock::now();
    for (const std::size_t host : hosts_)
      if (outcome.lost_hosts.contains(host))
        backoff_.record_failure(host, now);
      else if (restarts_.made_progress())
        backoff_.record_success(host);
    if (outcome.has_unreachable_host) next = std::max(next, now + unreachable_exit_time());
    return std::max(next, backoff_.when_available(min_hosts_));
  }

  /// Returns the line that announces a restart, with the failure, the number of the restart, the pause, and the hosts.
  std::string restart_text(const Verdict& verdict, Clock::time_point now, Clock::time_point next) const {
    const job::Fatal& fatal = verdict.fatal;
    std::string text = "lockstep: " + std::string(base::name(fatal.cause)) +
                       (fatal.rank >= 0 ? " of rank " + std::to_string(fatal.rank) : "") +
                       (fatal.host.empty() ? "" : " on " + fatal.host) + ": " +
                       base::telemetry::printable(fatal.detail) + "; restart " +
                       std::to_string(restarts_.num_restarts()) + " of " + std::to_string(job_.options.max_restarts) +
                       " in " + base::seconds_text(std::chrono::round<std::chrono::milliseconds>(next - now));
    if (num_hosts_ > 1) {
      const std::vector<std::size_t> used = backoff_.available(next);
      std::vector<std::size_t> excluded(num_hosts_);
      for (std::size_t host = 0; host < num_hosts_; ++host) excluded[host] = host;
      std::erase_if(excluded, [&](std::size_t host) { return std::ranges::find(used, host) != used.end(); });
      text += " on " + host_names(used) +
              (excluded.empty() ? "" : ", without " + host_names(excluded) + " (failed recently)");
    }
    return text +
           (restarts_.newest_checkpoint() > 0
                ? "; the newest checkpoint is number " + std::to_string(restarts_.newest_checkpoint())
                : "; no checkpoint was reported") +
           "\n";
  }

  std::string host_names(const std::vector<std::size_t>& hosts) const {
    if (hosts.size() > kMaxListedHosts) return std::to_string(hosts.size()) + " hosts";
    return base::joined(hosts, ", ", [&](std::size_t host) { return job_.options.hosts[host].name; });
  }

  std::optional<Verdict> wait_until(Clock::time_point next) const {
    const auto deadline = Deadline::at(next);
    do {
      pollfd entry{job_.signals, POLLIN, 0};
      ::poll(&entry, 1, deadline.poll_ms());
      while (const auto signal = process::read_signal(job_.signals))
        if (auto verdict = signal_verdict(*signal)) return verdict;
    } while (!deadline.expired());
    return std::nullopt;
  }

  /// Returns the verdict on a stop request that arrives while no rank runs; nullopt for other signals.
  std::optional<Verdict> signal_verdict(int signal) const {
    const int gen = std::max(0, restarts_.num_restarts() - 1);
    const std::string where = " before restart " + std::to_string(restarts_.num_restarts()) + " of " +
                              std::to_string(job_.options.max_restarts);
    if (signal == SIGUSR1)
      return verdict_on({.cause = base::Cause::kPreempted,
                         .host = base::net::host_name(),
                         .pid = ::getpid(),
                         .gen = gen,
                         .detail = "preempted (SIGUSR1)" + where,
                         .hint = "start the same command again"});
    if (signal != SIGINT && signal != SIGQUIT && signal != SIGTERM && signal != SIGHUP) return std::nullopt;
    Verdict verdict = judge_user_stop(signal);
    verdict.fatal.gen = gen;
    verdict.fatal.detail += where;
    return verdict;
  }

  /// Returns the signal with which the user has stopped the job since the last call; nullopt if there is none.
  std::optional<int> stop_signal() const {
    while (const auto signal = process::read_signal(job_.signals))
      if (*signal == SIGINT || *signal == SIGQUIT || *signal == SIGTERM || *signal == SIGHUP) return signal;
    return std::nullopt;
  }

  /// Prints the failure report and the FATAL line. Returns the exit code.
  int finish(JobOutcome& outcome) const {
    const std::string last = outcome.verdict && !outcome.verdict->is_silent
                                 ? outcome.failure_report + job::format_fatal(outcome.verdict->fatal) + "\n"
                                 : "";
    bool is_whole = true;
    std::optional<int> signal;
    if (outcome.output)
      is_whole = outcome.output->finish(last, [&] { return signal || (signal = stop_signal()); });
    else
      std::fputs(last.c_str(), stderr);
    const int exit_code = outcome.verdict ? exit_code_of(*outcome.verdict, job_.options)
                          : signal        ? 128 + *signal
                          : is_whole      ? 0
                                          : base::exit_code(base::Cause::kResource);
    if (job_.pods) job_.pods->end(exit_code, outcome.verdict ? job::format_fatal(outcome.verdict->fatal) : "");
    // At the very end: the home directory may be on a file server that does not answer.
    if (!last.empty()) output::save_last_fatal(job::format_fatal(outcome.verdict->fatal), base::Env::this_process());
    return exit_code;
  }

  const JobSpec& job_;
  const std::size_t num_hosts_, min_hosts_;
  Restarts restarts_;
  HostBackoff backoff_;
  std::vector<std::size_t> hosts_;  // numbers of the hosts of the current generation
};

}  // namespace

int run(cli::RunOptions options) {
  if (options.host_timeout) base::net::set_host_timeout(*options.host_timeout);
  options.hosts = slurm::resolve_hosts(std::move(options.hosts), options.env_from, base::Env::this_process());
  const base::Env& env = base::Env::this_process();
  std::optional<job::identity::Pod> pod;
  if (options.hosts.empty() && options.env_from != "none") pod = job::identity::find_pod_of_several(env);
  JobSpec job;
  std::vector<std::string> pod_command;  // must be the same in all pods
  if (pod) {
    job.pods_timeout = options.join_timeout.value_or(env.lockstep_join_timeout.value_or(base::kDefaultPodJoinTimeout));
    if (env.lockstep_key_file) job.context.key = job::JobKey::from_file(*env.lockstep_key_file);
    pod_command = options.command;
    if (options.ranks > 0) pod_command.insert(pod_command.begin(), {"-n", std::to_string(options.ranks)});
    options.hosts = hosts::hosts_of_pods(*pod, options.ranks);
    options.ranks = 0;  // all slots
  }
  check_min_hosts(options);
  process::check_proc();
  if (pod && pod->index > 0)
    return hosts::serve_pod(*pod, pod_command, job.context.key, Deadline::in(job.pods_timeout));
  read_own_errors();  // which reports an invalid file now, and not when a rank has failed
  plan::LaunchContext& context = job.context;
  context.launcher_directory = process::current_directory(options.directory);
  context.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  context.program = hosts::resolve_program(options, options.command.front());
  context.runs_python = process::runs_python(context.program);
  context.environment = plan::apply_exports(process::current_environment(), options.exports);
  for (const std::string& variable : options.exports) context.exported.emplace_back(process::variable_name(variable));
  context.columns = output::terminal_columns();
  context.job = random_job_id();
  context.name = options.name.empty() ? default_run_name(context.program) : options.name;
  context.run_dir = "runs/" + context.name;
  context.launcher_host = base::net::host_name();
  context.launcher_pid = ::getpid();
  // A shell that replaced itself by lockstep may have left children.
  job.inherited_children = process::has_children() ? process::descendants() : std::vector<pid_t>();
  const base::Fd signals(
      process::make_signal_fd(process::handled_signals()));  // before any thread exists, so that none receives a signal
  job.signals = signals.get();
  process::become_subreaper();
  job.max_files = base::raise_fd_limit(8 * options.hosts.size() + 64);
  job.staged_files = hosts::files_to_stage(options);
  std::optional<hosts::PodMeeting> pods;
  if (pod) pods.emplace(*pod, pod_command, context.key, Deadline::in(job.pods_timeout));
  job.pods = pods ? &*pods : nullptr;
  job.options = std::move(options);
  try {
    return RestartLoop(job).run();
  } catch (const base::Error& error) {
    Verdict verdict = verdict_on(job::to_fatal(error));
    verdict.exit_code = base::exit_code_before_start(error.cause());
    const std::string line = job::format_fatal(verdict.fatal);
    std::fprintf(stderr, "%s\n", line.c_str());
    const int exit_code = exit_code_of(verdict, job.options);
    if (pods) pods->end(exit_code, line);
    output::save_last_fatal(line, env);
    return exit_code;
  }
}

}  // namespace lockstep::launcher::supervise
