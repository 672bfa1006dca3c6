#include "lockstep/launch/supervise/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/supervise/hang.h"
#include "lockstep/launch/supervise/rank_states.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/supervise/verdict.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kOthersMayBeFirst = 100ms;  // a dead rank and those that lose it end within a few milliseconds
constexpr auto kAgentLooks = 1s;           // it answers within a few milliseconds
constexpr auto kRanksAreTold = 1s;         // a rank that waits hears of a failure within 0.1 s, and then ends by itself
constexpr auto kStacksTake = 5s;           // the agent gives them 4
constexpr auto kAgentIsSilent = 5s;        // at least; it tells of its ranks every second
constexpr int kSshFailed = 255;
constexpr auto kLeftBehindEnds = 5s;
constexpr auto kAgentAnswers = 8s;  // after the SIGKILL that it was to send; it gives up itself after 5

job::Fatal new_fatal(base::Cause cause, int rank, std::int64_t pid, std::string host = base::host_name()) {
  job::Fatal fatal;
  fatal.cause = cause;
  fatal.rank = rank;
  fatal.host = std::move(host);
  fatal.pid = pid;
  return fatal;
}

class Supervisor {
 public:
  Supervisor(const RunOptions& options, Start start, int signals, const std::vector<pid_t>& not_ours);
  Ended run();

 private:
  void start(Surroundings surroundings);
  void lose(std::size_t index);
  bool any_agent() const;
  Deadline next_look() const;
  void turn();
  void read_agent(std::size_t index);
  void handle(std::size_t agent, const Frame& frame);
  void rank_ended(RankEnd end);
  void note_preemption();
  void start_failed(std::size_t agent, int rank, StartStep step, int error);
  void unkillable(std::size_t agent, int rank, std::int64_t pid);
  void refused(const AgentLink& agent, const std::vector<std::string>& why);
  void out_of_reach(std::size_t index);
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
  void tell_all(const Frame& frame);
  void agent_is_silent(std::size_t index);
  void agent_is_gone(std::size_t index);
  std::optional<job::Fatal> published_cause();
  void conclude(job::Fatal fatal, int exit_code);

  const RunOptions options_;
  const std::vector<pid_t> not_ours_;
  const int signals_;
  const int generation_;
  std::vector<AgentLink> agents_;
  const std::vector<Node> nodes_;  // one for each agent
  std::vector<RankPlace> places_;
  std::unique_ptr<Output> output_;
  const std::string run_dir_;
  std::optional<job::StoreServer> store_;
  const job::PulseLimits limits_;
  std::vector<RankEnd> ends_;
  std::size_t num_ended_ = 0;
  Observed observed_;
  std::optional<job::Finding> finding_;  // what made us look, if no rank had ended
  bool looking_ = false;                 // the first failure has been seen, and what the ranks do is being asked
  Deadline looked_by_ = Deadline::never();
  std::set<std::size_t> looking_for_;       // agents that have not answered
  int stop_signal_ = 0;                     // a person's
  Deadline decide_at_ = Deadline::never();  // when the first failure is looked at
  std::optional<Verdict> verdict_;          // the first one stays
  std::set<std::size_t> done_;              // agents that said that no process is left
  Ended ended_;
};

std::vector<RankPlace> places_of(const std::vector<Node>& nodes) {
  std::vector<RankPlace> places;
  for (const Node& node : nodes) places.insert(places.end(), static_cast<std::size_t>(node.ranks), {node.name, -1});
  return places;
}

/// In front of each rank's lines.
std::vector<std::string> prefixes_of(const std::vector<RankPlace>& places, bool with_hosts) {
  std::vector<std::string> prefixes;
  for (const RankPlace& place : places)
    prefixes.push_back(prefix_of(static_cast<int>(prefixes.size()), with_hosts ? place.host : ""));
  return prefixes;
}

Supervisor::Supervisor(const RunOptions& options, Start plan, int signals, const std::vector<pid_t>& not_ours)
    : options_(options),
      not_ours_(not_ours),
      signals_(signals),
      generation_(plan.surroundings.generation),
      agents_(std::move(plan.agents)),
      nodes_(std::move(plan.nodes)),
      places_(places_of(nodes_)),
      output_(std::make_unique<Output>(options, prefixes_of(places_, nodes_.size() > 1))),
      run_dir_(plan.surroundings.run_dir),
      limits_(pulse_limits(options, plan.surroundings.environment)),
      observed_(static_cast<int>(places_.size()), limits_) {
  if (!plan.opening.empty()) output_->note(plan.opening);
  start(std::move(plan.surroundings));
}

void Supervisor::start(Surroundings surroundings) {
  surroundings.key = job::JobKey::random();
  store_.emplace(base::Address{surroundings.store.host, 0},
                 job::Credentials{surroundings.job, generation_, surroundings.key});
  surroundings.store = store_->address();
  const std::vector<JobPlan> jobs = plan_jobs(options_, surroundings, nodes_);
  for (std::size_t i = 0; i < agents_.size(); ++i) agents_[i].send({FrameKind::kJob, -1, encode_job(jobs[i])});
}

void Supervisor::tell_all(const Frame& frame) {
  for (AgentLink& agent : agents_) agent.send(frame);
}

void Supervisor::order_stop(const Stop& order) {
  tell_all({FrameKind::kStop, -1, encode_stop(order)});
  const auto stacks = verdict_ && !verdict_->stacks.empty() ? kStacksTake : 0s;
  for (AgentLink& agent : agents_) agent.must_end(Deadline::in(stacks + order.warning + order.grace + kAgentAnswers));
}

void Supervisor::conclude(job::Fatal fatal, int exit_code) {
  if (!verdict_) verdict_ = Verdict{std::move(fatal), exit_code, {}};
}

std::optional<job::Fatal> Supervisor::published_cause() {
  const auto line = store_->store().find(job::key::kCause, Deadline::in(1s));
  return line ? job::parse_fatal(*line) : std::nullopt;
}

Verdict Supervisor::verdict_on(const RankEnd& end) {
  return judge(end, {.tail = output_->tail(end.rank),
                     .prefix = output_->prefix(end.rank),
                     .published = published_cause(),
                     .places = places_});
}

/// A cause that a rank has published before was the first.
Verdict Supervisor::verdict_on_hang(const std::vector<base::RankSeen>& ranks) {
  Verdict verdict = judge_hang(*finding_, observed_.pulses(), ranks, {limits_, run_dir_, places_});
  if (auto published = published_cause()) {
    verdict.fatal = std::move(*published);
    verdict.exit_code = base::exit_code(verdict.fatal.cause);
  }
  return verdict;
}

/// The first failure has been seen; what the ranks were doing is asked before anybody is told.
void Supervisor::decide() {
  decide_at_ = Deadline::never();
  if (!verdict_ && stop_signal_ == 0 && first_failure(ends_)) look();
}

void Supervisor::look() {
  if (std::exchange(looking_, true)) return;
  tell_all({FrameKind::kLook, -1, {}});
  for (std::size_t i = 0; i < agents_.size(); ++i)
    if (agents_[i].descriptor() >= 0) looking_for_.insert(i);
  looked_by_ = Deadline::in(kAgentLooks);
}

/// The agents have said what the ranks were doing, or will not.
void Supervisor::looked() {
  looked_by_ = Deadline::never();
  if (verdict_ || stop_signal_ != 0) return;
  const RankEnd* end = first_failure(ends_);
  const std::vector<base::RankSeen> ranks = observed_.ranks();
  if (end)
    verdict_ = verdict_on(*end);
  else if (finding_)
    verdict_ = verdict_on_hang(ranks);
  else
    return;
  add_place(verdict_->fatal, ranks);
  add_stack(*verdict_, ends_, run_dir_, places_);
  job::publish_cause(store_->store(), verdict_->fatal);
  if (!verdict_->stacks.empty()) tell_all({FrameKind::kStacks, -1, encode_ranks(verdict_->stacks)});
  order_stop({.signal = SIGTERM, .warning = kRanksAreTold, .grace = options_.fail_grace});
}

void Supervisor::take_pulse(const job::Pulse& pulse) {
  if (observed_.add(pulse) && !verdict_) {
    job::Fatal silence = silence_of(pulse, places_, limits_);
    silence.gen = generation_;
    output_->note(job::to_warning(silence));
  }
  if (verdict_ || stop_signal_ != 0 || looking_) return;
  finding_ = observed_.find_stuck();
  if (finding_) look();
}

void Supervisor::rank_ended(RankEnd end) {
  end.preempted = end.exit_code() == base::exit_code(base::Cause::kPreempted) &&
                  store_->store().find(job::key::left(end.rank), Deadline::in(1s));
  output_->end(end.rank);
  ends_.push_back(end);
  ++num_ended_;
  observed_.ended(end.rank);
  store_->store().set(job::key::exited(end.rank), to_text(end), Deadline::in(1s));
  if (end.failed() && decide_at_.is_never() && !verdict_ && !looking_) decide_at_ = Deadline::in(kOthersMayBeFirst);
  if (num_ended_ == places_.size()) decide();
}

/// The host is to blame, or nobody looks after its ranks any more.
void Supervisor::lose(std::size_t index) { ended_.lost.insert(nodes_[index].number); }

void Supervisor::start_failed(std::size_t agent, int rank, StartStep step, int error) {
  const std::string why = std::string(": ") + std::strerror(error);
  job::Fatal fatal = new_fatal(base::Cause::kResource, rank, -1, places_.at(static_cast<std::size_t>(rank)).host);
  if (step == StartStep::kExec) {
    fatal.cause = base::Cause::kBadArg;
    fatal.detail = "program " + base::quoted(options_.command.front(), 256) + ": cannot be executed" + why;
    if (error == ENOEXEC) fatal.hint = "a script needs a first line such as #!/bin/sh";
  } else {
    fatal.detail = (step == StartStep::kFork ? "cannot start rank " : "cannot bind to its cores rank ") +
                   std::to_string(rank) + why;
    fatal.hint = step == StartStep::kFork ? "fewer ranks, or raise ulimit -u" : "--bind none";
    lose(agent);
  }
  const int code = base::exit_code(fatal.cause);
  conclude(std::move(fatal), code);
  order_stop({.signal = SIGKILL});
}

void Supervisor::refused(const AgentLink& agent, const std::vector<std::string>& why) {
  job::Fatal fatal = new_fatal(base::Cause::kBadArg, -1, -1, agent.host());
  fatal.detail = why[0];
  fatal.hint = why[1];
  conclude(std::move(fatal), base::exit_code(base::Cause::kBadArg));
  order_stop({.signal = SIGKILL});
}

void Supervisor::unkillable(std::size_t agent, int rank, std::int64_t pid) {
  lose(agent);
  const std::string& host = agents_[agent].host();
  const std::string what = "process " + std::to_string(pid) + (rank >= 0 ? " of rank " + std::to_string(rank) : "") +
                           " on host " + host + " did not end within 5 s after SIGKILL";
  const std::string hint = "it hangs in the kernel: look there at /proc/" + std::to_string(pid) + "/stack";
  if (verdict_ && verdict_->fatal.cause != base::Cause::kInterrupted) {  // a failure, which came first
    verdict_->fatal.detail += "; " + what + ": " + hint;
    return;
  }
  job::Fatal fatal = new_fatal(base::Cause::kUnkillable, rank, pid, host);
  fatal.detail = what;
  fatal.hint = hint;
  verdict_ = Verdict{std::move(fatal), base::exit_code(base::Cause::kUnkillable), {}};
}

void Supervisor::handle(std::size_t agent, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::kStarted:
      places_.at(static_cast<std::size_t>(frame.rank)).pid = decode_numbers(frame.payload, 1)[0];
      break;
    case FrameKind::kStdout: output_->add(frame.rank, Stream::kOut, frame.payload); break;
    case FrameKind::kStderr: output_->add(frame.rank, Stream::kErr, frame.payload); break;
    case FrameKind::kEnded: rank_ended(decode_end(frame.payload)); break;
    case FrameKind::kStartFailed: {
      const auto numbers = decode_numbers(frame.payload, 2);
      start_failed(agent, frame.rank, static_cast<StartStep>(numbers[0]), static_cast<int>(numbers[1]));
      break;
    }
    case FrameKind::kDropped:
      output_->note(std::to_string(decode_numbers(frame.payload, 1)[0]) +
                    " bytes of output dropped: the launcher stood still");
      break;
    case FrameKind::kPulse: take_pulse(decode_pulse(frame.payload)); break;
    case FrameKind::kSaved:
      ended_.attempt.saved = std::max(ended_.attempt.saved, decode_numbers(frame.payload, 1)[0]);
      break;
    case FrameKind::kFlight:
      if (!verdict_) observed_.add(decode_seen(frame.payload));  // what ranks do that are to end is of no interest
      break;
    case FrameKind::kAlive: break;
    case FrameKind::kLooked:
      looking_for_.erase(agent);
      if (looking_for_.empty()) looked();
      break;
    case FrameKind::kRefused: refused(agents_[agent], decode_texts(frame.payload, 2)); break;
    case FrameKind::kUnkillable: unkillable(agent, frame.rank, decode_numbers(frame.payload, 1)[0]); break;
    case FrameKind::kDone: done_.insert(agent); break;
    default: throw base::Error(base::Cause::kProtocol, "the agent sent a frame that only the launcher sends");
  }
}

void Supervisor::read_agent(std::size_t index) {
  for (const Frame& frame : agents_[index].read()) handle(index, frame);
  if (agents_[index].descriptor() < 0) agent_is_gone(index);
}

void Supervisor::take_signal(int signal) {
  if (signal == SIGUSR1 || signal == SIGUSR2) {
    ended_.asked_too_late |= signal == SIGUSR1 && (looking_ || verdict_);
    return tell_all({FrameKind::kSignal, -1, encode_numbers({signal})});
  }
  if (signal == SIGCHLD) return;
  const bool again = stop_signal_ != 0 || verdict_;
  if (stop_signal_ == 0) stop_signal_ = signal;
  if (again) {
    output_->note("killing all ranks");
    return order_stop({.signal = SIGKILL});
  }
  output_->note("stopping all ranks: SIGTERM, and SIGKILL in " + std::to_string(options_.grace.count() / 1000) + " s" +
                (signal == SIGINT ? "; Ctrl-C again kills them at once" : ""));
  job::Fatal fatal = new_fatal(base::Cause::kInterrupted, -1, ::getpid());
  fatal.detail = signal == SIGINT ? "stopped by Ctrl-C (SIGINT)" : "stopped by " + signal_name(signal);
  conclude(std::move(fatal), 128 + signal);
  order_stop({.signal = SIGTERM, .grace = options_.grace});
}

/// Nobody watches its ranks any more, and nobody passes on what they write.
void Supervisor::agent_is_silent(std::size_t index) {
  const AgentLink& agent = agents_[index];
  lose(index);
  job::Fatal fatal = new_fatal(base::Cause::kInternal, -1, agent.pid(), agent.host());
  fatal.detail = "the agent, which watches the ranks, has told nothing for " +
                 std::to_string(silence_of_agents(limits_) / 1s) + " s";
  fatal.hint = "was it stopped by a signal?";
  conclude(std::move(fatal), base::exit_code(base::Cause::kInternal));
  order_stop({.signal = SIGKILL});
}

std::string text_of(const std::string& words) { return words.empty() ? "" : ": " + base::quoted(words, 512); }

/// The connection to its host ended by itself; its ranks end for the same reason.
void Supervisor::out_of_reach(std::size_t index) {
  lose(index);
  job::Fatal fatal = new_fatal(base::Cause::kPeerUnreachable, -1, -1, agents_[index].host());
  fatal.detail = "host " + agents_[index].host() + " cannot be reached any more: nothing was heard of it for " +
                 std::to_string(base::kHostIsSilent / 1s) + " s";
  fatal.hint = "its ranks end by themselves within 10 s";
  conclude(std::move(fatal), base::exit_code(base::Cause::kPeerUnreachable));
  agents_[index].must_end(Deadline::in(0s));
  order_stop({.signal = SIGKILL});
}

/// Its pipe has ended. Without the last frame it was killed, or its host is out of reach; on this host the kernel has
/// ended its ranks, and what they had started has become ours; elsewhere they end when the agent's connection does.
void Supervisor::agent_is_gone(std::size_t index) {
  const RankEnd end = agents_[index].reap();
  looking_for_.erase(index);
  if (looking_ && looking_for_.empty()) looked();  // at what it had told before
  if (done_.contains(index)) return;
  lose(index);
  ended_.out_of_sight |= !nodes_[index].here;
  job::Fatal fatal = new_fatal(base::Cause::kInternal, -1, end.pid, agents_[index].host());
  if (nodes_[index].here || (end.signal == 0 && end.code != kSshFailed)) {
    const RankEnd agent = end.code > 128 ? RankEnd{.signal = end.code - 128} : end;  // as its guard has told it
    fatal.detail = "the agent, which watches the ranks, " + std::string(agent.signal ? "was " : "") + to_text(agent) +
                   text_of(agents_[index].words());
    fatal.hint = "all ranks of this host ended with it";
  } else {
    fatal.cause = base::Cause::kPeerUnreachable;
    fatal.detail = "the connection to the agent on host " + agents_[index].host() + " ended: " + agents_[index].way() +
                   " " + std::string(end.signal ? "was " : "") + to_text(end) + text_of(agents_[index].words());
    fatal.hint = "its ranks end with it, within 10 s";
  }
  const int code = base::exit_code(fatal.cause);
  conclude(std::move(fatal), code);
  order_stop({.signal = SIGKILL});
  if (nodes_[index].here &&
      std::count_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.here; }) == 1)
    for (const pid_t pid : kill_descendants(not_ours_, Deadline::in(kLeftBehindEnds))) unkillable(index, -1, pid);
}

bool Supervisor::any_agent() const {
  return std::any_of(agents_.begin(), agents_.end(), [](const AgentLink& agent) { return agent.descriptor() >= 0; });
}

Deadline Supervisor::next_look() const {
  Deadline next = earlier(decide_at_, looked_by_);
  for (const AgentLink& agent : agents_)
    if (agent.descriptor() >= 0) next = earlier(next, agent.next_look());
  return next;
}

void Supervisor::turn() {
  std::vector<pollfd> entries = {{signals_, POLLIN, 0}};
  for (const AgentLink& agent : agents_) entries.push_back({agent.descriptor(), POLLIN, 0});
  for (const AgentLink& agent : agents_) entries.push_back({agent.tether(), POLLIN, 0});
  ::poll(entries.data(), entries.size(), next_look().poll_ms());
  if (entries[0].revents)
    while (const auto signal = next_signal(signals_)) take_signal(*signal);
  for (std::size_t i = 0; i < agents_.size(); ++i)
    if (entries[i + 1].revents) read_agent(i);
  for (std::size_t i = 0; i < agents_.size(); ++i)
    if (entries[i + 1 + agents_.size()].revents && agents_[i].tether_is_cut()) out_of_reach(i);
  if (decide_at_.expired()) decide();
  if (looked_by_.expired()) looked();
  for (std::size_t i = 0; i < agents_.size(); ++i)
    if (agents_[i].descriptor() >= 0 && agents_[i].look_at_clock()) agent_is_silent(i);
}

Ended Supervisor::run() {
  while (any_agent()) turn();
  note_preemption();
  take_own_code();
  if (verdict_) {
    verdict_->fatal.gen = generation_;
    ended_.last_words = last_words();
  }
  ended_.verdict = std::move(verdict_);
  ended_.stopped = stop_signal_ != 0;
  ended_.output = std::move(output_);
  return std::move(ended_);
}

/// All ranks have left together because they were asked to, by the person who stopped us or by somebody else. Ctrl-C is
/// a person who waits.
void Supervisor::note_preemption() {
  const bool all = std::all_of(ends_.begin(), ends_.end(), [](const RankEnd& end) { return end.preempted; });
  if (!all || ends_.size() < places_.size() || stop_signal_ == SIGINT || (verdict_ && stop_signal_ == 0)) return;
  job::Fatal fatal = new_fatal(base::Cause::kPreempted, ends_.front().rank, ends_.front().pid,
                               places_.at(static_cast<std::size_t>(ends_.front().rank)).host);
  add_place(fatal, observed_.ranks());
  fatal.op.clear();
  fatal.detail = "all ranks left together because one of them was asked to stop (SIGTERM or SIGUSR1)";
  fatal.hint = "start the same command again";
  verdict_ = Verdict{std::move(fatal), base::exit_code(base::Cause::kPreempted), {}};
}

/// A rank that died or exited may have told why before its process had ended, and others may have ended before it.
void Supervisor::take_own_code() {
  if (!verdict_ ||
      (verdict_->fatal.cause != base::Cause::kRankDied && verdict_->fatal.cause != base::Cause::kRankExited))
    return;
  for (const RankEnd& end : ends_)
    if (end.rank == verdict_->fatal.rank && end.failed()) verdict_->exit_code = end.exit_code();
}

/// Where the ranks were, and what the one at fault wrote.
std::string Supervisor::last_words() {
  const std::string tail = output_->tail(verdict_->fatal.rank);
  return (verdict_->fatal.cause == base::Cause::kPreempted ? "" : observed_.text()) +
         (tail.empty() ? ""
                       : "lockstep: the last lines that rank " + std::to_string(verdict_->fatal.rank) +
                             " wrote to stderr:\n" + tail);
}

}  // namespace

std::chrono::milliseconds silence_of_agents(const job::PulseLimits& limits) {
  return limits.stall > 0ms ? std::max<std::chrono::milliseconds>(limits.stall, kAgentIsSilent) : 0ms;
}

Ended supervise(const RunOptions& options, Start start, int signals, const std::vector<pid_t>& not_ours) {
  return Supervisor(options, std::move(start), signals, not_ours).run();
}

}  // namespace lockstep::launcher
