#include "lockstep/launch/supervise/run.h"

#include <poll.h>
#include <signal.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <optional>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/slurm/allocation.h"
#include "lockstep/launch/supervise/generation.h"
#include "lockstep/launch/supervise/host_backoff.h"
#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kUnreachableExitTime = 10s;  // in which ranks end whose agent has lost us
constexpr std::size_t kMaxListedHosts = 8;  // that a line names one by one

/// "train-20261122-091503-4711": of no other run.
std::string default_run_name(const std::string& program) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char time[32];
  std::strftime(time, sizeof time, "-%Y%m%d-%H%M%S-", &local);
  return std::filesystem::path(program).filename().string() + time + std::to_string(::getpid());
}

/// This program, and the one to run where it was named by a path: what PATH finds is there as well.
StagedFiles files_to_stage(const RunOptions& options) {
  if (!options.ship || std::all_of(options.hosts.begin(), options.hosts.end(), is_local_host)) return nullptr;
  std::vector<StagedFile> cargo = {read_staged_file(executable_path())};
  const std::string& program = options.command.front();
  if (program.find('/') != std::string::npos)
    cargo.push_back(
        read_staged_file(program[0] == '/' || options.directory.empty() ? program : options.directory + "/" + program));
  return std::make_shared<const std::vector<StagedFile>>(std::move(cargo));
}

/// The same for all starts of a job: their generations keep them apart.
std::string random_job_id() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes))
    throw base::SystemError("getrandom", errno);
  std::string hex;
  for (const unsigned char byte : bytes) hex += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return hex;
}

std::size_t count_hosts(const RunOptions& options) { return std::max<std::size_t>(1, options.hosts.size()); }

void check_min_hosts(const RunOptions& options) {
  if (options.min_hosts > static_cast<int>(count_hosts(options)))
    throw base::UsageError("--min-hosts is " + std::to_string(options.min_hosts) + ", but the job has " +
                           std::to_string(count_hosts(options)) + (count_hosts(options) == 1 ? " host" : " hosts"));
}

std::string seconds_text(Clock::duration time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(time).count());
  return text;
}

/// The starts of a job, one after another, until one is the last.
class RestartLoop {
 public:
  explicit RestartLoop(const JobSpec& job)
      : job_(job),
        num_hosts_(count_hosts(job.options)),
        min_hosts_(job.options.min_hosts > 0 ? static_cast<std::size_t>(job.options.min_hosts) : num_hosts_),
        restarts_(job.options.max_restarts, job.options.restart_pause),
        backoff_(num_hosts_) {}
  int run();

 private:
  std::optional<std::chrono::milliseconds> next_pause(JobOutcome& ended);
  Clock::time_point back_off_hosts(const JobOutcome& ended, Clock::time_point next);
  std::string restart_text(const Verdict& verdict, Clock::time_point now, Clock::time_point next) const;
  std::string host_names(const std::vector<std::size_t>& hosts) const;
  std::optional<Verdict> wait_until(Clock::time_point next) const;
  std::optional<Verdict> signal_verdict(int signal) const;
  static int finish(JobOutcome& ended);

  const JobSpec& job_;
  const std::size_t num_hosts_, min_hosts_;
  Restarts restarts_;
  HostBackoff backoff_;
  std::vector<std::size_t> hosts_;  // of the last start
};

/// The last line; the exit code.
int RestartLoop::finish(JobOutcome& ended) {
  const std::string last = ended.verdict ? ended.failure_report + job::format_fatal(ended.verdict->fatal) + "\n" : "";
  if (ended.output)
    ended.output->finish(last);
  else
    std::fputs(last.c_str(), stderr);
  return ended.verdict ? ended.verdict->exit_code : 0;
}

/// The pause before the next start; nothing when this was the last.
std::optional<std::chrono::milliseconds> RestartLoop::next_pause(JobOutcome& ended) {
  if (!ended.verdict || ended.is_stopped) return std::nullopt;
  const auto pause = restarts_.next(ended.attempt, *ended.verdict);
  if (!pause || !ended.preempted_too_late) return pause;
  ended.verdict = signal_verdict(SIGUSR1);
  return std::nullopt;
}

/// When the next start may be: later than `next` where the hosts that are left are too few, or one may yet have ranks.
Clock::time_point RestartLoop::back_off_hosts(const JobOutcome& ended, Clock::time_point next) {
  const auto now = Clock::now();
  for (const std::size_t host : hosts_)
    if (ended.lost.contains(host))
      backoff_.failed(host, now);
    else if (restarts_.made_progress())
      backoff_.record_success(host);
  if (ended.has_unreachable_host) next = std::max(next, now + kUnreachableExitTime);
  return std::max(next, backoff_.when_available(min_hosts_));
}

std::string RestartLoop::host_names(const std::vector<std::size_t>& hosts) const {
  if (hosts.size() > kMaxListedHosts) return std::to_string(hosts.size()) + " hosts";
  std::string names;
  for (const std::size_t host : hosts) names += (names.empty() ? "" : ", ") + job_.options.hosts[host].name;
  return names;
}

/// Why, which restart of how many, after which pause, and where it goes on.
std::string RestartLoop::restart_text(const Verdict& verdict, Clock::time_point now, Clock::time_point next) const {
  const job::Fatal& fatal = verdict.fatal;
  std::string text = "lockstep: " + std::string(base::name(fatal.cause)) +
                     (fatal.rank >= 0 ? " of rank " + std::to_string(fatal.rank) : "") +
                     (fatal.host.empty() ? "" : " on " + fatal.host) + ": " + base::printable(fatal.detail) +
                     "; restart " + std::to_string(restarts_.num_restarts()) + " of " +
                     std::to_string(job_.options.max_restarts) + " in " + seconds_text(next - now);
  if (num_hosts_ > 1) {
    const std::vector<std::size_t> used = backoff_.available(next);
    std::vector<std::size_t> resting(num_hosts_);
    for (std::size_t host = 0; host < num_hosts_; ++host) resting[host] = host;
    std::erase_if(resting, [&](std::size_t host) { return std::find(used.begin(), used.end(), host) != used.end(); });
    text += " on " + host_names(used) +
            (resting.empty()
                 ? ""
                 : ", without " + host_names(resting) + (resting.size() == 1 ? ", which rests" : ", which rest"));
  }
  return text +
         (restarts_.newest_checkpoint() > 0
              ? "; the newest checkpoint is number " + std::to_string(restarts_.newest_checkpoint())
              : "; no checkpoint is known of") +
         "\n";
}

/// Of a wish that the job end while none of its ranks runs; nothing for other signals.
std::optional<Verdict> RestartLoop::signal_verdict(int signal) const {
  job::Fatal fatal;
  fatal.host = base::host_name();
  fatal.pid = ::getpid();
  fatal.gen = std::max(0, restarts_.num_restarts() - 1);
  const std::string where = " before restart " + std::to_string(restarts_.num_restarts()) + " of " +
                            std::to_string(job_.options.max_restarts);
  if (signal == SIGUSR1) {
    fatal.cause = base::Cause::kPreempted;
    fatal.detail = "asked to leave (SIGUSR1)" + where;
    fatal.hint = "start the same command again";
    return Verdict{fatal, base::exit_code(fatal.cause), {}};
  }
  if (signal != SIGINT && signal != SIGTERM && signal != SIGHUP) return std::nullopt;
  fatal.cause = base::Cause::kInterrupted;
  fatal.detail = "stopped by " + (signal == SIGINT ? "Ctrl-C (SIGINT)" : signal_name(signal)) + where;
  return Verdict{fatal, 128 + signal, {}};
}

std::optional<Verdict> RestartLoop::wait_until(Clock::time_point next) const {
  const auto deadline = base::Deadline::at(next);
  do {
    pollfd entry{job_.signals, POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_ms());
    while (const auto signal = read_signal(job_.signals))
      if (auto verdict = signal_verdict(*signal)) return verdict;
  } while (!deadline.expired());
  return std::nullopt;
}

int RestartLoop::run() {
  WorldSize world;
  hosts_ = backoff_.available({});
  for (;;) {
    const auto begun = Clock::now();
    JobOutcome ended = run_generation(job_, restarts_.num_restarts(), hosts_,
                                      restarts_.num_restarts() == 0 ? num_hosts_ : min_hosts_, world);
    const auto now = Clock::now();
    ended.attempt.duration = std::chrono::duration_cast<std::chrono::milliseconds>(now - begun);
    const auto pause = next_pause(ended);
    if (!pause) return finish(ended);
    const auto next = back_off_hosts(ended, now + *pause);
    const std::string said = ended.failure_report + restart_text(*ended.verdict, now, next);
    if (ended.output)
      ended.output->finish(said);
    else
      std::fputs(said.c_str(), stderr);
    ended.failure_report.clear();
    if ((ended.verdict = wait_until(next))) return finish(ended);
    hosts_ = backoff_.available(Clock::now());
  }
}

}  // namespace

std::vector<int> handled_signals() {
  std::vector<int> handled = {SIGCHLD, SIGUSR1, SIGUSR2};
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action{};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) handled.push_back(signal);
  }
  return handled;
}

std::string resolve_program(const HostOptions& options, const std::string& name) {
  const bool here = options.hosts.empty() || std::any_of(options.hosts.begin(), options.hosts.end(), is_local_host);
  const bool relative = name.find('/') != std::string::npos && name[0] != '/';
  if (name.find('/') != std::string::npos && (!here || (relative && !options.directory.empty()))) return name;
  return find_program(name, base::Env::this_process().path.value_or("/usr/local/bin:/usr/bin:/bin"));
}

job::Fatal to_fatal(const base::Error& error) {
  job::Fatal fatal;
  fatal.cause = error.cause();
  fatal.host = base::host_name();
  fatal.pid = ::getpid();
  fatal.detail = error.what();
  fatal.hint = error.hint();
  return fatal;
}

int run(RunOptions options) {
  options.hosts = resolve_hosts(std::move(options.hosts), options.env_from, base::Env::this_process());
  check_min_hosts(options);
  JobSpec job;
  LaunchContext& context = job.context;
  context.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  context.here = std::filesystem::current_path();
  context.program = resolve_program(options, options.command.front());
  context.environment = apply_exports(current_environment(), options.exports);
  for (const std::string& variable : options.exports)
    context.exported.push_back(variable.substr(0, variable.find('=')));
  context.columns = terminal_columns();
  context.job = random_job_id();
  context.run_dir = "runs/" + (options.name.empty() ? default_run_name(context.program) : options.name);
  job.inherited_children = has_children() ? descendants() : std::vector<pid_t>();  // left us by a shell's exec
  const base::Fd signals(make_signal_fd(handled_signals()));  // before any thread exists, so that none takes a signal
  job.signals = signals.get();
  become_subreaper();
  job.max_files = base::raise_fd_limit(8 * options.hosts.size() + 64);
  job.cargo = files_to_stage(options);
  job.options = std::move(options);
  return RestartLoop(job).run();
}

}  // namespace lockstep::launcher
