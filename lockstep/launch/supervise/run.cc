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
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/launch/slurm/allocation.h"
#include "lockstep/launch/supervise/generation.h"
#include "lockstep/launch/supervise/host_backoff.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kOutOfSight = 10s;     // in which ranks end whose agent has lost us
constexpr std::size_t kFewHosts = 8;  // that a line names one by one

/// "train-20261122-091503-4711": of no other run.
std::string default_name(const std::string& program) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char time[32];
  std::strftime(time, sizeof time, "-%Y%m%d-%H%M%S-", &local);
  return std::filesystem::path(program).filename().string() + time + std::to_string(::getpid());
}

/// This program, and the one to run where it was named by a path: what PATH finds is there as well.
Cargoes cargo_for(const RunOptions& options) {
  if (!options.ship || std::all_of(options.hosts.begin(), options.hosts.end(), is_here)) return nullptr;
  std::vector<Cargo> cargo = {cargo_of(own_path())};
  const std::string& program = options.command.front();
  if (program.find('/') != std::string::npos)
    cargo.push_back(
        cargo_of(program[0] == '/' || options.directory.empty() ? program : options.directory + "/" + program));
  return std::make_shared<const std::vector<Cargo>>(std::move(cargo));
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
class Life {
 public:
  explicit Life(const Undertaking& job)
      : job_(job),
        num_hosts_(count_hosts(job.options)),
        least_(job.options.min_hosts > 0 ? static_cast<std::size_t>(job.options.min_hosts) : num_hosts_),
        restarts_(job.options.max_restarts, job.options.restart_pause),
        rest_(num_hosts_) {}
  int run();

 private:
  std::optional<std::chrono::milliseconds> judge(Ended& ended);
  Clock::time_point rest_hosts(const Ended& ended, Clock::time_point next);
  std::string announcement(const Verdict& verdict, Clock::time_point now, Clock::time_point next) const;
  std::string names_of(const std::vector<std::size_t>& hosts) const;
  std::optional<Verdict> wait_until(Clock::time_point next) const;
  std::optional<Verdict> verdict_on(int signal) const;
  static int finish(Ended& ended);

  const Undertaking& job_;
  const std::size_t num_hosts_, least_;
  Restarts restarts_;
  HostRest rest_;
  std::vector<std::size_t> hosts_;  // of the last start
};

/// The last line; the exit code.
int Life::finish(Ended& ended) {
  const std::string last = ended.verdict ? ended.last_words + job::to_line(ended.verdict->fatal) + "\n" : "";
  if (ended.output)
    ended.output->finish(last);
  else
    std::fputs(last.c_str(), stderr);
  return ended.verdict ? ended.verdict->exit_code : 0;
}

/// The pause before the next start; nothing when this was the last.
std::optional<std::chrono::milliseconds> Life::judge(Ended& ended) {
  if (!ended.verdict || ended.stopped) return std::nullopt;
  const auto pause = restarts_.next(ended.attempt, *ended.verdict);
  if (!pause || !ended.asked_too_late) return pause;
  ended.verdict = verdict_on(SIGUSR1);
  return std::nullopt;
}

/// When the next start may be: later than `next` where the hosts that are left are too few, or one may yet have ranks.
Clock::time_point Life::rest_hosts(const Ended& ended, Clock::time_point next) {
  const auto now = Clock::now();
  for (const std::size_t host : hosts_)
    if (ended.lost.contains(host))
      rest_.failed(host, now);
    else if (restarts_.progressed())
      rest_.served(host);
  if (ended.out_of_sight) next = std::max(next, now + kOutOfSight);
  return std::max(next, rest_.enough_at(least_));
}

std::string Life::names_of(const std::vector<std::size_t>& hosts) const {
  if (hosts.size() > kFewHosts) return std::to_string(hosts.size()) + " hosts";
  std::string names;
  for (const std::size_t host : hosts) names += (names.empty() ? "" : ", ") + job_.options.hosts[host].name;
  return names;
}

/// Why, which restart of how many, after which pause, and where it goes on.
std::string Life::announcement(const Verdict& verdict, Clock::time_point now, Clock::time_point next) const {
  const job::Fatal& fatal = verdict.fatal;
  std::string text = "lockstep: " + std::string(base::name(fatal.cause)) +
                     (fatal.rank >= 0 ? " of rank " + std::to_string(fatal.rank) : "") +
                     (fatal.host.empty() ? "" : " on " + fatal.host) + ": " + base::printable(fatal.detail) +
                     "; restart " + std::to_string(restarts_.made()) + " of " +
                     std::to_string(job_.options.max_restarts) + " in " + seconds_text(next - now);
  if (num_hosts_ > 1) {
    const std::vector<std::size_t> used = rest_.rested(next);
    std::vector<std::size_t> resting(num_hosts_);
    for (std::size_t host = 0; host < num_hosts_; ++host) resting[host] = host;
    std::erase_if(resting, [&](std::size_t host) { return std::find(used.begin(), used.end(), host) != used.end(); });
    text +=
        " on " + names_of(used) +
        (resting.empty() ? ""
                         : ", without " + names_of(resting) + (resting.size() == 1 ? ", which rests" : ", which rest"));
  }
  return text +
         (restarts_.newest() > 0 ? "; the newest checkpoint is number " + std::to_string(restarts_.newest())
                                 : "; no checkpoint is known of") +
         "\n";
}

/// Of a wish that the job end while none of its ranks runs; nothing for other signals.
std::optional<Verdict> Life::verdict_on(int signal) const {
  job::Fatal fatal;
  fatal.host = base::host_name();
  fatal.pid = ::getpid();
  fatal.gen = std::max(0, restarts_.made() - 1);
  const std::string where =
      " before restart " + std::to_string(restarts_.made()) + " of " + std::to_string(job_.options.max_restarts);
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

std::optional<Verdict> Life::wait_until(Clock::time_point next) const {
  const auto deadline = base::Deadline::at(next);
  do {
    pollfd entry{job_.signals, POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_ms());
    while (const auto signal = next_signal(job_.signals))
      if (auto verdict = verdict_on(*signal)) return verdict;
  } while (!deadline.expired());
  return std::nullopt;
}

int Life::run() {
  WorldSize world;
  hosts_ = rest_.rested({});
  for (;;) {
    const auto begun = Clock::now();
    Ended ended = run_generation(job_, restarts_.made(), hosts_, restarts_.made() == 0 ? num_hosts_ : least_, world);
    const auto now = Clock::now();
    ended.attempt.lasted = std::chrono::duration_cast<std::chrono::milliseconds>(now - begun);
    const auto pause = judge(ended);
    if (!pause) return finish(ended);
    const auto next = rest_hosts(ended, now + *pause);
    const std::string said = ended.last_words + announcement(*ended.verdict, now, next);
    if (ended.output)
      ended.output->finish(said);
    else
      std::fputs(said.c_str(), stderr);
    ended.last_words.clear();
    if ((ended.verdict = wait_until(next))) return finish(ended);
    hosts_ = rest_.rested(Clock::now());
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

std::string program_of(const HostOptions& options, const std::string& name) {
  const bool here = options.hosts.empty() || std::any_of(options.hosts.begin(), options.hosts.end(), is_here);
  const bool relative = name.find('/') != std::string::npos && name[0] != '/';
  if (name.find('/') != std::string::npos && (!here || (relative && !options.directory.empty()))) return name;
  return find_program(name, base::Env::process().path.value_or("/usr/local/bin:/usr/bin:/bin"));
}

job::Fatal fatal_of(const base::Error& error) {
  job::Fatal fatal;
  fatal.cause = error.cause();
  fatal.host = base::host_name();
  fatal.pid = ::getpid();
  fatal.detail = error.what();
  fatal.hint = error.hint();
  return fatal;
}

int run(RunOptions options) {
  options.hosts = with_allocation(std::move(options.hosts), options.env_from, base::Env::process());
  check_min_hosts(options);
  Undertaking job;
  Surroundings& surroundings = job.surroundings;
  surroundings.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  surroundings.here = std::filesystem::current_path();
  surroundings.program = program_of(options, options.command.front());
  surroundings.environment = with_exports(own_environment(), options.exports);
  for (const std::string& variable : options.exports)
    surroundings.exported.push_back(variable.substr(0, variable.find('=')));
  surroundings.columns = terminal_columns();
  surroundings.job = random_job_id();
  surroundings.run_dir = "runs/" + (options.name.empty() ? default_name(surroundings.program) : options.name);
  job.not_ours = has_children() ? descendants() : std::vector<pid_t>();  // left us by a shell's exec
  const base::Fd signals(
      signal_descriptor(handled_signals()));  // before any thread exists, so that none takes a signal
  job.signals = signals.get();
  become_subreaper();
  job.max_files = base::allow_files(8 * options.hosts.size() + 64);
  job.cargo = cargo_for(options);
  job.options = std::move(options);
  return Life(job).run();
}

}  // namespace lockstep::launcher
