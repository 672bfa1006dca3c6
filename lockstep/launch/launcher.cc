#include "lockstep/launch/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <optional>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/socket.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/hang.h"
#include "lockstep/launch/observed.h"
#include "lockstep/launch/output.h"
#include "lockstep/launch/plan.h"
#include "lockstep/launch/process.h"
#include "lockstep/launch/program.h"
#include "lockstep/launch/verdict.h"
#include "lockstep/launch/wire.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kOthersMayBeFirst = 100ms;  // a dead rank and those that lose it end within a few milliseconds
constexpr auto kAgentLooks = 1s;           // it answers within a few milliseconds
constexpr auto kRanksAreTold = 1s;         // a rank that waits hears of a failure within 0.1 s, and then ends by itself
constexpr auto kStacksTake = 5s;           // the agent gives them 4
constexpr auto kAgentIsSilent = 5s;        // at least; it tells of its ranks every second
constexpr auto kAgentIsAsked = 2s;         // whether it is silent, or this process has slept as well
constexpr auto kOverslept = 1s;
constexpr auto kAgentEnds = 5s;            // after its last frame
constexpr auto kAgentAnswers = 8s;         // after the SIGKILL that it was to send; it gives up itself after 5
const base::Address kLoopback{"127.0.0.1", 0};

std::string random_job_id() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) throw base::SystemError("getrandom", errno);
  std::string hex;
  for (const unsigned char byte : bytes) hex += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return hex;
}

int num_gpus() {
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    if (name.rfind("nvidia", 0) == 0 && base::parse_int(std::string_view(name).substr(6))) ++count;
  }
  return count;
}

Environment own_environment() {
  Environment all;
  for (char** variable = ::environ; *variable; ++variable) all.emplace_back(*variable);
  return all;
}

/// The signals that a person stops the job with, without those that whoever started us has switched off (nohup).
std::vector<int> handled_signals() {
  std::vector<int> handled = {SIGCHLD, SIGUSR1, SIGUSR2};
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) handled.push_back(signal);
  }
  return handled;
}

/// "train-20261122-091503-4711": of no other run.
std::string default_name(const std::string& program) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char time[32];
  std::strftime(time, sizeof time, "-%Y%m%d-%H%M%S-", &local);
  return std::filesystem::path(program).filename().string() + time + std::to_string(::getpid());
}

job::Fatal new_fatal(base::Cause cause, int rank, std::int64_t pid) {
  job::Fatal fatal;
  fatal.cause = cause;
  fatal.rank = rank;
  fatal.host = base::host_name();
  fatal.pid = pid;
  return fatal;
}

class Launcher {
 public:
  Launcher(const RunOptions& options, Surroundings surroundings, std::uint64_t max_files);
  int run();

 private:
  void start(Surroundings surroundings, std::uint64_t max_files);
  void turn();
  void read_agent();
  void handle(const Frame& frame);
  void rank_ended(RankEnd end);
  void note_preemption();
  void start_failed(int rank, StartStep step, int error);
  void unkillable(int rank, std::int64_t pid);
  void take_signal(int signal);
  void decide();
  void look();
  void looked();
  void take_pulse(const job::Pulse& pulse);
  Verdict verdict_on(const RankEnd& end);
  Verdict verdict_on_hang(const std::vector<base::RankSeen>& ranks);
  void take_own_code();
  void order_stop(const Stop& order);
  std::string last_words();
  void send(const Frame& frame);
  Deadline agent_must_tell() const;
  void agent_is_silent();
  void agent_is_gone();
  std::optional<job::Fatal> published_cause();
  void conclude(job::Fatal fatal, int exit_code);

  const RunOptions options_;
  const std::string host_ = base::host_name();
  const std::int64_t oom_kills_ = oom_kills();
  const std::vector<pid_t> not_ours_ = has_children() ? descendants() : std::vector<pid_t>();  // left us by a shell's exec
  base::Fd signals_{signal_descriptor(handled_signals())};  // before any thread exists, so that none takes a signal
  Output output_;
  const std::string run_dir_;
  AgentProcess agent_;
  std::optional<job::StoreServer> store_;
  base::Fd master_port_;
  FrameReader from_agent_{kMaxFrame};
  std::vector<std::int64_t> pids_;
  const job::PulseLimits limits_;
  std::vector<RankEnd> ends_;
  std::size_t num_ended_ = 0;
  Observed observed_;
  std::optional<job::Finding> finding_;         // what made us look, if no rank had ended
  bool looking_ = false;                        // the first failure has been seen, and what the ranks do is being asked
  Deadline looked_by_ = Deadline::never();
  int stop_signal_ = 0;                         // a person's
  Deadline decide_at_ = Deadline::never();      // when the first failure is looked at
  Deadline agent_dead_at_ = Deadline::never();  // when an agent that should have finished is killed
  Deadline agent_silent_at_ = Deadline::never();  // when one that tells nothing is, after one more short wait
  bool agent_is_asked_ = false;                   // this is that wait
  std::optional<Verdict> verdict_;              // the first one stays
  bool done_ = false;                           // the agent said that no process is left
};

Launcher::Launcher(const RunOptions& options, Surroundings surroundings, std::uint64_t max_files)
    : options_(options), output_(options, options.ranks), run_dir_(surroundings.run_dir), pids_(static_cast<std::size_t>(options.ranks), -1),
      limits_(pulse_limits(options, surroundings.environment)), observed_(options.ranks, limits_) {
  start(std::move(surroundings), max_files);
}

void Launcher::start(Surroundings surroundings, std::uint64_t max_files) {
  become_subreaper();
  agent_ = spawn_agent(max_files);  // before a thread exists; its own start goes on while ours does
  surroundings.job = random_job_id();
  surroundings.key = job::JobKey::random();
  store_.emplace(kLoopback, job::Credentials{surroundings.job, 0, surroundings.key});
  master_port_ = base::reserve_port(kLoopback);
  surroundings.store = base::to_string(store_->address());
  surroundings.master_port = base::local_address(master_port_.get()).port;
  base::set_nonblocking(agent_.to.get());
  base::set_nonblocking(agent_.from.get());
  send({FrameKind::kJob, -1, encode_job(plan_job(options_, surroundings))});
  agent_silent_at_ = agent_must_tell();
}

void Launcher::send(const Frame& frame) {
  const std::string bytes = encode(frame);
  const Deadline deadline = Deadline::in(10s);
  for (std::size_t done = 0; done < bytes.size() && agent_.to;) {
    const ssize_t size = ::write(agent_.to.get(), bytes.data() + done, bytes.size() - done);
    if (size > 0) done += static_cast<std::size_t>(size);
    else if (errno == EAGAIN && base::wait_writable(agent_.to.get(), deadline)) continue;
    else if (errno != EINTR) agent_.to.reset();  // it is gone, or ends its ranks when it sees this
  }
}

void Launcher::order_stop(const Stop& order) {
  send({FrameKind::kStop, -1, encode_stop(order)});
  const auto stacks = verdict_ && !verdict_->stacks.empty() ? kStacksTake : 0s;
  agent_dead_at_ = earlier(agent_dead_at_, Deadline::in(stacks + order.warning + order.grace + kAgentAnswers));
}

void Launcher::conclude(job::Fatal fatal, int exit_code) {
  if (!verdict_) verdict_ = Verdict{std::move(fatal), exit_code, {}};
}

std::optional<job::Fatal> Launcher::published_cause() {
  const auto line = store_->store().find(job::key::kCause, Deadline::in(1s));
  return line ? job::parse_fatal(*line) : std::nullopt;
}

Verdict Launcher::verdict_on(const RankEnd& end) {
  return judge(end, {.host = host_,
                     .oom_kills = end.signal == SIGKILL ? oom_kills() - oom_kills_ : 0,
                     .tail = output_.tail(end.rank),
                     .published = published_cause(),
                     .pids = pids_});
}

/// A cause that a rank has published before was the first.
Verdict Launcher::verdict_on_hang(const std::vector<base::RankSeen>& ranks) {
  Verdict verdict = judge_hang(*finding_, observed_.pulses(), ranks, {limits_, host_, run_dir_, pids_});
  if (auto published = published_cause()) {
    verdict.fatal = std::move(*published);
    verdict.exit_code = base::exit_code(verdict.fatal.cause);
  }
  return verdict;
}

/// The first failure has been seen; what the ranks were doing is asked before anybody is told.
void Launcher::decide() {
  decide_at_ = Deadline::never();
  if (!verdict_ && stop_signal_ == 0 && first_failure(ends_)) look();
}

void Launcher::look() {
  if (std::exchange(looking_, true)) return;
  send({FrameKind::kLook, -1, {}});
  looked_by_ = Deadline::in(kAgentLooks);
}

/// The agent has said what the ranks were doing, or will not.
void Launcher::looked() {
  looked_by_ = Deadline::never();
  if (verdict_ || stop_signal_ != 0) return;
  const RankEnd* end = first_failure(ends_);
  const std::vector<base::RankSeen> ranks = observed_.ranks();
  if (end) verdict_ = verdict_on(*end);
  else if (finding_) verdict_ = verdict_on_hang(ranks);
  else return;
  add_place(verdict_->fatal, ranks);
  add_stack(*verdict_, ends_, run_dir_);
  job::publish_cause(store_->store(), verdict_->fatal);
  if (!verdict_->stacks.empty()) send({FrameKind::kStacks, -1, encode_ranks(verdict_->stacks)});
  order_stop({.signal = SIGTERM, .warning = kRanksAreTold, .grace = options_.fail_grace});
}

void Launcher::take_pulse(const job::Pulse& pulse) {
  if (observed_.add(pulse) && !verdict_) output_.note(job::to_warning(silence_of(pulse, host_, pids_, limits_)));
  if (verdict_ || stop_signal_ != 0 || looking_) return;
  finding_ = observed_.find_stuck();
  if (finding_) look();
}

void Launcher::rank_ended(RankEnd end) {
  end.preempted = end.exit_code() == base::exit_code(base::Cause::kPreempted) && store_->store().find(job::key::left(end.rank), Deadline::in(1s));
  output_.end(end.rank);
  ends_.push_back(end);
  ++num_ended_;
  observed_.ended(end.rank);
  store_->store().set(job::key::exited(end.rank), to_text(end), Deadline::in(1s));
  if (end.failed() && decide_at_.is_never() && !verdict_ && !looking_) decide_at_ = Deadline::in(kOthersMayBeFirst);
  if (num_ended_ == pids_.size()) decide();
}

void Launcher::start_failed(int rank, StartStep step, int error) {
  const std::string why = std::string(": ") + std::strerror(error);
  job::Fatal fatal = new_fatal(base::Cause::kResource, rank, -1);
  if (step == StartStep::kExec) {
    fatal.cause = base::Cause::kBadArg;
    fatal.detail = "program " + base::quoted(options_.command.front(), 256) + ": cannot be executed" + why;
    if (error == ENOEXEC) fatal.hint = "a script needs a first line such as #!/bin/sh";
  } else {
    fatal.detail = (step == StartStep::kFork ? "cannot start rank " : "cannot bind to its cores rank ") + std::to_string(rank) + why;
    fatal.hint = step == StartStep::kFork ? "fewer ranks, or raise ulimit -u" : "--bind none";
  }
  const int code = base::exit_code(fatal.cause);
  conclude(std::move(fatal), code);
  order_stop({.signal = SIGKILL});
}

void Launcher::unkillable(int rank, std::int64_t pid) {
  const std::string what = "process " + std::to_string(pid) + (rank >= 0 ? " of rank " + std::to_string(rank) : "") + " did not end within 5 s after SIGKILL";
  const std::string hint = "it hangs in the kernel: look at /proc/" + std::to_string(pid) + "/stack";
  if (verdict_ && verdict_->fatal.cause != base::Cause::kInterrupted) {  // a failure, which came first
    verdict_->fatal.detail += "; " + what + ": " + hint;
    return;
  }
  job::Fatal fatal = new_fatal(base::Cause::kUnkillable, rank, pid);
  fatal.detail = what;
  fatal.hint = hint;
  verdict_ = Verdict{std::move(fatal), base::exit_code(base::Cause::kUnkillable), {}};
}

void Launcher::handle(const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::kStarted: pids_.at(static_cast<std::size_t>(frame.rank)) = decode_numbers(frame.payload, 1)[0]; break;
    case FrameKind::kStdout: output_.add(frame.rank, Stream::kOut, frame.payload); break;
    case FrameKind::kStderr: output_.add(frame.rank, Stream::kErr, frame.payload); break;
    case FrameKind::kEnded: rank_ended(decode_end(frame.payload)); break;
    case FrameKind::kStartFailed: {
      const auto numbers = decode_numbers(frame.payload, 2);
      start_failed(frame.rank, static_cast<StartStep>(numbers[0]), static_cast<int>(numbers[1]));
      break;
    }
    case FrameKind::kDropped:
      output_.note(std::to_string(decode_numbers(frame.payload, 1)[0]) + " bytes of output dropped: the launcher stood still");
      break;
    case FrameKind::kPulse: take_pulse(decode_pulse(frame.payload)); break;
    case FrameKind::kFlight:
      if (!verdict_) observed_.add(decode_seen(frame.payload));  // what ranks do that are to end is of no interest
      break;
    case FrameKind::kAlive: break;
    case FrameKind::kLooked: looked(); break;
    case FrameKind::kUnkillable: unkillable(frame.rank, decode_numbers(frame.payload, 1)[0]); break;
    case FrameKind::kDone: done_ = true; break;
    default: throw base::Error(base::Cause::kProtocol, "the agent sent a frame that only the launcher sends");
  }
}

void Launcher::read_agent() {
  char bytes[1 << 16];
  const ssize_t size = ::read(agent_.from.get(), bytes, sizeof bytes);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size > 0) {
    from_agent_.feed({bytes, static_cast<std::size_t>(size)});
    agent_silent_at_ = agent_must_tell();
    agent_is_asked_ = false;
  }
  while (const auto frame = from_agent_.next()) handle(*frame);
  if (size <= 0) agent_.from.reset();
}

void Launcher::take_signal(int signal) {
  if (signal == SIGUSR1 || signal == SIGUSR2) return send({FrameKind::kSignal, -1, encode_numbers({signal})});
  if (signal == SIGCHLD) return;
  const bool again = stop_signal_ != 0 || verdict_;
  if (stop_signal_ == 0) stop_signal_ = signal;
  if (again) {
    output_.note("killing all ranks");
    return order_stop({.signal = SIGKILL});
  }
  output_.note("stopping all ranks: SIGTERM, and SIGKILL in " + std::to_string(options_.grace.count() / 1000) + " s" +
               (signal == SIGINT ? "; Ctrl-C again kills them at once" : ""));
  job::Fatal fatal = new_fatal(base::Cause::kInterrupted, -1, ::getpid());
  fatal.detail = signal == SIGINT ? "stopped by Ctrl-C (SIGINT)" : "stopped by " + signal_name(signal);
  conclude(std::move(fatal), 128 + signal);
  order_stop({.signal = SIGTERM, .grace = options_.grace});
}

Deadline Launcher::agent_must_tell() const {
  return limits_.stall > 0ms ? Deadline::in(std::max<std::chrono::milliseconds>(limits_.stall, kAgentIsSilent)) : Deadline::never();  // bounded: as the user wants it
}

/// Nobody watches the ranks any more, and nobody passes on what they write.
void Launcher::agent_is_silent() {
  // All may have stood still, as when a machine is suspended: it has time to speak when this process has not slept in between.
  const bool we_slept = Deadline::Clock::now() - agent_silent_at_.when() > kOverslept;
  agent_silent_at_ = Deadline::in(kAgentIsAsked);
  if (we_slept || !std::exchange(agent_is_asked_, true)) return;
  agent_silent_at_ = Deadline::never();  // bounded: it is killed
  job::Fatal fatal = new_fatal(base::Cause::kInternal, -1, agent_.pid);
  fatal.detail = "the agent, which watches the ranks, has told nothing for " + std::to_string(std::max<std::int64_t>(limits_.stall / 1s, kAgentIsSilent / 1s)) + " s";
  fatal.hint = "was it stopped by a signal?";
  conclude(std::move(fatal), base::exit_code(base::Cause::kInternal));
  ::kill(agent_.pid, SIGKILL);
}

/// Its pipe has ended. Without the last frame it was killed; the kernel has ended its ranks, and what they had started has
/// become ours.
void Launcher::agent_is_gone() {
  int status = 0;
  const Deadline deadline = Deadline::in(kAgentEnds);
  agent_.to.reset();
  while (::waitpid(agent_.pid, &status, WNOHANG) == 0 && !deadline.expired()) base::wait_readable(signals_.get(), earlier(deadline, Deadline::in(20ms)));
  looked();  // at what it had told before
  if (done_) return;
  ::kill(agent_.pid, SIGKILL);
  const RankEnd end{-1, agent_.pid, WIFEXITED(status) ? WEXITSTATUS(status) : 0, WIFSIGNALED(status) ? WTERMSIG(status) : 0};
  job::Fatal fatal = new_fatal(base::Cause::kInternal, -1, agent_.pid);
  fatal.detail = "the agent, which watches the ranks, " + std::string(end.signal ? "was " : "") + to_text(end);
  fatal.hint = "all ranks of this host ended with it";
  conclude(std::move(fatal), base::exit_code(base::Cause::kInternal));
  for (const pid_t pid : kill_descendants(not_ours_, deadline)) unkillable(-1, pid);
}

void Launcher::turn() {
  pollfd entries[] = {{signals_.get(), POLLIN, 0}, {agent_.from.get(), POLLIN, 0}};
  ::poll(entries, 2, earlier(earlier(decide_at_, looked_by_), earlier(agent_dead_at_, agent_silent_at_)).poll_ms());
  if (entries[0].revents)
    while (const auto signal = next_signal(signals_.get())) take_signal(*signal);
  if (entries[1].revents) read_agent();
  if (decide_at_.expired()) decide();
  if (looked_by_.expired()) looked();
  if (agent_silent_at_.expired()) agent_is_silent();
  if (agent_dead_at_.expired()) {
    ::kill(agent_.pid, SIGKILL);
    agent_dead_at_ = Deadline::never();
  }
}

int Launcher::run() {
  while (agent_.from) turn();
  agent_is_gone();
  note_preemption();
  take_own_code();
  if (!verdict_) {
    output_.finish("");
    return 0;
  }
  output_.finish(last_words());
  return verdict_->exit_code;
}

/// All ranks have left together because they were asked to, by the person who stopped us or by somebody else. Ctrl-C is a person who waits.
void Launcher::note_preemption() {
  const bool all = std::all_of(ends_.begin(), ends_.end(), [](const RankEnd& end) { return end.preempted; });
  if (!all || ends_.size() < pids_.size() || stop_signal_ == SIGINT || (verdict_ && stop_signal_ == 0)) return;
  job::Fatal fatal = new_fatal(base::Cause::kPreempted, ends_.front().rank, ends_.front().pid);
  add_place(fatal, observed_.ranks());
  fatal.op.clear();
  fatal.detail = "all ranks left together because one of them was asked to stop (SIGTERM or SIGUSR1)";
  fatal.hint = "start the same command again";
  verdict_ = Verdict{std::move(fatal), base::exit_code(base::Cause::kPreempted), {}};
}

/// A rank that died or exited may have told why before its process had ended, and others may have ended before it.
void Launcher::take_own_code() {
  if (!verdict_ || (verdict_->fatal.cause != base::Cause::kRankDied && verdict_->fatal.cause != base::Cause::kRankExited)) return;
  for (const RankEnd& end : ends_)
    if (end.rank == verdict_->fatal.rank && end.failed()) verdict_->exit_code = end.exit_code();
}

/// Where the ranks were, what the one at fault wrote, and the cause.
std::string Launcher::last_words() {
  const std::string tail = output_.tail(verdict_->fatal.rank);
  return (verdict_->fatal.cause == base::Cause::kPreempted ? "" : observed_.text()) +
         (tail.empty() ? "" : "lockstep: the last lines that rank " + std::to_string(verdict_->fatal.rank) + " wrote to stderr:\n" + tail) +
         job::to_line(verdict_->fatal) + "\n";
}

}  // namespace

job::Fatal fatal_of(const base::Error& error) {
  job::Fatal fatal = new_fatal(error.cause(), -1, ::getpid());
  fatal.detail = error.what();
  fatal.hint = error.hint();
  return fatal;
}

int run(RunOptions options) {
  Surroundings surroundings;
  surroundings.program = find_program(options.command.front(), base::Env::process().path.value_or("/usr/local/bin:/usr/bin:/bin"));
  surroundings.environment = own_environment();
  surroundings.cpus = usable_cpus();
  surroundings.columns = terminal_columns();
  surroundings.run_dir = "runs/" + (options.name.empty() ? default_name(surroundings.program) : options.name);
  if (options.ranks == 0) options.ranks = default_ranks(surroundings.environment, num_gpus(), num_cores(surroundings.cpus));
  // Beside the store two files of output of each rank, and our own.
  const auto num_files = job::files_of_store(options.ranks) + static_cast<std::uint64_t>(options.output_dir.empty() ? 0 : 2 * options.ranks) + 64;
  const std::uint64_t max_files = base::allow_files(num_files);
  return Launcher(options, std::move(surroundings), max_files).run();
}

}  // namespace lockstep::launcher
