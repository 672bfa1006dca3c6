#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/supervise/agent_verdict.h"
#include "lockstep/launch/supervise/generation.h"
#include "lockstep/launch/supervise/hang.h"
#include "lockstep/launch/supervise/rank_states.h"
#include "lockstep/launch/supervise/status_service.h"
#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher::supervise {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

/// Reads the standard input and hands each chunk to every agent that needs it. It reads the next one when all of them
/// have taken the last, so that the slowest rank sets the pace and memory is bounded. Not thread-safe.
class StdinForwarder {
 public:
  /// The first agent has rank 0.
  StdinForwarder(cli::StdinRanks ranks, std::size_t num_agents) {
    if (ranks == cli::StdinRanks::kRankZero) agents_.insert(0);
    for (std::size_t i = 0; i < num_agents && ranks == cli::StdinRanks::kAll; ++i) agents_.insert(i);
  }

  /// Call it when the ranks have been started.
  void start() { is_started_ = true; }
  /// Returns the descriptor to poll for reading; -1 while no input is needed, or while another process group is in the
  /// foreground of the terminal.
  int poll_fd() const {
    if (!is_started_ || has_ended_ || agents_.empty() || !awaited_.empty()) return -1;
    const bool in_background = ::isatty(STDIN_FILENO) == 1 && ::tcgetpgrp(STDIN_FILENO) != ::getpgrp();
    return in_background ? -1 : STDIN_FILENO;
  }
  /// Reads what is available and calls `send` with each agent and the bytes, which are empty at the end of the input.
  /// Call it when poll_fd() is readable.
  void forward(const std::function<void(std::size_t, const std::string&)>& send) {
    std::string bytes(std::size_t{1} << 16, '\0');
    const ssize_t size = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (size < 0 && (errno == EINTR || errno == EAGAIN)) return;
    bytes.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    has_ended_ = bytes.empty();
    for (const std::size_t agent : agents_) send(agent, bytes);
    awaited_ = agents_;
  }
  /// The ranks of an agent have taken the last chunk.
  void on_taken(std::size_t agent) { awaited_.erase(agent); }
  void on_agent_lost(std::size_t agent) {
    agents_.erase(agent);
    awaited_.erase(agent);
  }

 private:
  std::set<std::size_t> agents_;   // that have ranks that read the input
  std::set<std::size_t> awaited_;  // agents that have not taken the last chunk
  bool is_started_ = false;
  bool has_ended_ = false;
};

class Supervisor {
 public:
  Supervisor(const cli::RunOptions& options, PreparedJob job, int signals, const std::vector<pid_t>& inherited_children)
      : options_(options),
        inherited_children_(inherited_children),
        signals_(signals),
        generation_(job.context.generation),
        agents_(std::move(job.agents)),
        nodes_(std::move(job.nodes)),
        locations_(rank_locations(nodes_)),
        output_(std::make_unique<output::Output>(options, rank_prefixes(locations_, nodes_.size() > 1),
                                                 plan::output_window(locations_.size()))),
        stdin_(options.stdin_ranks, agents_.size()),
        status_(plan::job_label(job.context, static_cast<int>(locations_.size())), nodes_),
        run_dir_(job.context.run_dir),
        limits_(plan::health_limits(options, job.context.environment)),
        rank_states_(static_cast<int>(locations_.size()), limits_) {
    if (!job.start_note.empty()) output_->print_note(job.start_note);
    send_jobs(std::move(job.context));
  }

  JobOutcome run() {
    watch_events();
    while (has_agent()) {
      loop_.run_once();
      status_.reply_if_due();
      output_->drop_stalled();
    }
    conclude_preemption();
    if (verdict_) {
      cause_of_exits().settle(*verdict_, rank_states_.snapshots());
      verdict_->fatal.gen = generation_;
      outcome_.failure_report = verdict_->printed_stacks + failure_report(verdict_->fatal, rank_states_.text(),
                                                                          output_->tail(verdict_->fatal.rank));
    }
    outcome_.verdict = std::move(verdict_);
    outcome_.is_stopped = stop_signal_ != 0;
    outcome_.output = std::move(output_);
    return std::move(outcome_);
  }

 private:
  using Kind = protocol::FrameKind;

  void send_jobs(plan::LaunchContext context) {
    if (!context.key.is_set()) context.key = job::JobKey::random();
    store_.emplace(base::net::Address{context.store.host, 0}, job::Credentials{context.job, generation_, context.key},
                   plan::count_ranks(nodes_));
    context.store = store_->address();
    const std::vector<plan::JobPlan> jobs = plan::plan_jobs(options_, context, nodes_);
    for (std::size_t i = 0; i < agents_.size(); ++i) agents_[i].send({Kind::kJob, -1, protocol::encode_job(jobs[i])});
  }

  /// Records that the host has failed, or that its ranks are no longer monitored.
  void mark_host_lost(std::size_t index) { outcome_.lost_hosts.insert(nodes_[index].number); }

  bool has_agent() const {
    return std::ranges::any_of(agents_, [](const hosts::AgentLink& agent) { return agent.descriptor() >= 0; });
  }

  void watch_events() {
    loop_.at([this] { return decide_at_; }, [this] { decide(); });
    loop_.at([this] { return snapshot_deadline_; }, [this] { on_snapshots(); });
    loop_.on_readable([this] { return signals_; },
                      [this] {
                        while (const auto signal = process::read_signal(signals_)) on_signal(*signal);
                      });
    for (std::size_t i = 0; i < agents_.size(); ++i)
      loop_.on_readable([this, i] { return agents_[i].descriptor(); }, [this, i] { read_agent(i); });
    for (std::size_t i = 0; i < agents_.size(); ++i) watch_end_of(i);  // after what the agents have sent
    loop_.on_readable([this] { return output_->failure_fd(); },
                      [this] {
                        if (output_->check_failures()) on_reader_closed();
                      });
    loop_.on_readable([this] { return stdin_.poll_fd(); },
                      [this] {
                        stdin_.forward([&](std::size_t agent, const std::string& bytes) {
                          agents_[agent].send({Kind::kStdin, -1, bytes});
                        });
                      });
    loop_.on_readable([this] { return status_.fd(); }, [this] { status_.accept(agents_); });
    loop_.on_readable([this] { return output_->acks().fd(); }, [this] { send_acks(); });
    loop_.at([this] { return earlier(output_->next_drop(), status_.deadline()); },
             [] {});  // run() calls both each time
  }

  void watch_end_of(std::size_t index) {
    hosts::AgentLink& agent = agents_[index];
    loop_.on_readable([&agent] { return agent.liveness_fd(); },
                      [this, index, &agent] {
                        if (agent.close_liveness_fd()) on_host_unreachable(index);
                      });
    loop_.at([&agent] { return agent.descriptor() < 0 ? Deadline::never() : agent.next_deadline(); },
             [this, index, &agent] {
               if (!agent.check_timeouts()) return;
               mark_host_lost(index);  // no process monitors its ranks or reads their output
               kill_all(judge_silent_agent(agent.host(), agent.pid(), agent_silence_limit(limits_)));
             });
  }

  void read_agent(std::size_t index) {
    try {
      for (const protocol::Frame& frame : agents_[index].read()) handle_frame(index, frame);
    } catch (const base::Error& error) {
      conclude(judge_invalid_agent(agents_[index].host(), agents_[index].pid(), error));
      agents_[index].kill();
      done_agents_.erase(index);  // so that on_agent_lost() stops the other hosts
    }
    if (agents_[index].descriptor() < 0) on_agent_lost(index);
  }

  void handle_frame(std::size_t agent, const protocol::Frame& frame) {
    const auto number = [&] { return protocol::decode_numbers(frame.payload, 1)[0]; };
    switch (frame.kind) {
      case Kind::kStdout: return output_->add(frame.rank, output::Stream::kOut, frame.payload);
      case Kind::kStderr: return output_->add(frame.rank, output::Stream::kErr, frame.payload);
      case Kind::kRankHealth: return on_rank_health(protocol::decoded<job::health::RankHealth>(frame.payload));
      case Kind::kPrepared: return on_prepared(agent, frame.payload);
      case Kind::kRefused: {
        const auto why = protocol::decode_texts(frame.payload, 2);
        return kill_all(judge_refusal(agents_[agent].host(), why[0], why[1]));
      }
      case Kind::kSignalled: return on_signal(static_cast<int>(number()), agents_[agent].host());
      case Kind::kStarted: location_of(frame.rank, locations_).pid = number(); return;
      case Kind::kStartFailed: {
        const auto numbers = protocol::decode_numbers(frame.payload, 2);
        const process::StartStep step = to_start_step(numbers[0]);
        if (step != process::StartStep::kExec) mark_host_lost(agent);
        return kill_all(judge_start_failure(step, static_cast<int>(numbers[1]), frame.rank,
                                            location_of(frame.rank, locations_).host, options_.command.front()));
      }
      case Kind::kStdinTaken: return stdin_.on_taken(agent);
      case Kind::kPythonLocation:
        if (verdict_) add_python_location(*verdict_, frame.rank, frame.payload);
        return;
      case Kind::kStacks:
        if (verdict_) add_stacks(*verdict_, frame.rank, frame.payload);
        return;
      case Kind::kUsesLibrary:
        if (locations_.size() > 1 && warnings_.insert("library " + frame.payload).second)
          output_->print_note(foreign_library_note(frame.payload, locations_.size(), options_.command));
        return;
      case Kind::kLeftBehind:
        return output_->print_note(left_behind_note(frame.rank, frame.payload, options_.fail_grace));
      case Kind::kCheckpointSaved:
        outcome_.attempt.newest_checkpoint = std::max(outcome_.attempt.newest_checkpoint, number());
        return;
      case Kind::kSnapshot: {
        const auto snapshot = protocol::decode_snapshot(frame.payload);
        if (!verdict_) rank_states_.add(snapshot);  // later snapshots show ranks that are being stopped
        return;
      }
      case Kind::kSnapshotsDone:
        awaited_snapshots_.erase(agent);
        if (awaited_snapshots_.empty()) on_snapshots();
        return;
      case Kind::kRankStatus: return status_.add(agent, protocol::decode_rank_status(frame.payload));
      case Kind::kStatusDone: return status_.on_done(agent);
      case Kind::kRankExited: return on_rank_exit(protocol::decode_rank_exit(frame.payload));
      case Kind::kUnkillable: return on_unkillable(agent, frame.rank, number());
      case Kind::kDone: done_agents_.insert(agent); return;
      case Kind::kAlive: return;
      default: protocol::throw_unexpected(frame.kind);
    }
  }

  void on_rank_exit(protocol::RankExit end) {
    location_of(end.rank, locations_);  // throws for an unknown rank
    end.preempted = end.exit_code() == base::exit_code(base::Cause::kPreempted) &&
                    store_->store().find(job::key::left(end.rank), Deadline::in(1s));
    output_->close_rank(end.rank);
    add_lost_peer(end, output_->tail(end.rank), output_->prefix(end.rank));
    end.after_stop = stop_at_.expired();
    exits_.push_back(end);
    rank_states_.on_rank_exit(end.rank);
    store_->store().set(job::key::exited(end.rank), job::encode(end.record()), Deadline::in(1s));
    if (end.failed() && decide_at_.is_never() && !verdict_ && !snapshots_requested_)
      decide_at_ = Deadline::in(base::kFirstFailureWindow);
    if (end.failed() && culprit_deadline_.is_never()) culprit_deadline_ = Deadline::in(base::kCulpritWait);
    if (exits_.size() == locations_.size()) decide();
  }

  /// Sets the verdict to kPreempted if all ranks exited together after a stop request (SIGTERM or SIGUSR1). After
  /// Ctrl-C the verdict stays kInterrupted.
  void conclude_preemption() {
    const bool all = std::ranges::all_of(exits_, &protocol::RankExit::preempted);
    if (!all || exits_.size() < locations_.size() || stop_signal_ == SIGINT || (verdict_ && stop_signal_ == 0)) return;
    verdict_ =
        judge_preemption(exits_.front(), location_of(exits_.front().rank, locations_).host, rank_states_.snapshots());
  }

  void on_unkillable(std::size_t agent, int rank, std::int64_t pid) {
    mark_host_lost(agent);
    Verdict unkillable = judge_unkillable(agents_[agent].host(), rank, pid);
    if (verdict_ && verdict_->fatal.cause != base::Cause::kInterrupted) {  // the verdict on an earlier failure stays
      verdict_->fatal.detail += "; " + unkillable.fatal.detail + ": " + unkillable.fatal.hint;
      return;
    }
    verdict_ = std::move(unkillable);
  }

  /// Stops the job, because the connection to the host has timed out. The host's agent detects the same and kills its
  /// ranks.
  void on_host_unreachable(std::size_t index) {
    mark_host_lost(index);
    conclude(judge_unreachable_host(agents_[index].host()));
    agents_[index].kill_after(Deadline::in(0s));
    send_stop({.signal = SIGKILL});
  }

  void on_signal(int signal, const std::string& host = base::net::host_name()) {
    if (signal == SIGUSR1 || signal == SIGUSR2) {
      outcome_.preempted_too_late |= signal == SIGUSR1 && (snapshots_requested_ || verdict_);
      return broadcast(Kind::kSignal, protocol::encode_numbers({signal}));
    }
    if (signal == SIGCHLD) return;
    const bool again = stop_signal_ != 0 || verdict_;
    if (stop_signal_ == 0) stop_signal_ = signal;
    if (again) {
      output_->print_note("killing all ranks");
      return send_stop({.signal = SIGKILL});
    }
    output_->allow_drops();
    if (signal == SIGQUIT) return stop_with_stacks();
    output_->print_note(stop_note(signal, options_.grace));
    conclude(judge_user_stop(signal, host));
    stop_ranks(signal == SIGINT ? SIGINT : SIGTERM);
  }

  /// Requests snapshots if a rank has failed. on_snapshots() then determines the verdict.
  void decide() {
    decide_at_ = Deadline::never();
    const bool is_unknown = is_culprit_missing(exits_, locations_.size()) && !cause_of_exits().is_known();
    if ((is_unknown || cause_of_exits().needs_exit_of_rank_that_left()) && !culprit_deadline_.expired()) {
      decide_at_ = Deadline::in(base::kFirstFailureWindow);
      return;
    }
    if (!verdict_ && stop_signal_ == 0 && first_failure(exits_)) request_snapshots();
  }

  void request_snapshots() {
    if (std::exchange(snapshots_requested_, true)) return;
    broadcast(Kind::kSnapshotRequest);
    for (std::size_t i = 0; i < agents_.size(); ++i)
      if (agents_[i].descriptor() >= 0) awaited_snapshots_.insert(i);
    snapshot_deadline_ = Deadline::in(base::kSnapshotTimeout);
  }

  /// Determines the verdict, publishes it and stops the ranks. Called when all snapshots have arrived or their deadline
  /// has expired.
  void on_snapshots() {
    snapshot_deadline_ = Deadline::never();
    if (verdict_ || stop_signal_ != 0) return;
    const protocol::RankExit* end = first_failure(exits_);
    const std::vector<base::telemetry::RankSnapshot> ranks = rank_states_.snapshots();
    if (end)
      verdict_ = cause_of_exits().judge(*end);
    else if (finding_)
      verdict_ = hang_verdict(ranks);
    else
      return;
    add_step_and_operation(verdict_->fatal, ranks);
    request_stack(*verdict_, exits_, run_dir_, locations_);
    job::publish_cause(store_->store(), verdict_->fatal);
    if (!verdict_->stacks.empty()) broadcast(Kind::kWriteStacks, protocol::encode_ranks(verdict_->stacks));
    send_stop({.signal = SIGTERM, .notice_period = base::kFailureNotice, .grace = options_.fail_grace});
  }

  void print_warning(job::Fatal warning) {
    warning.gen = generation_;
    output_->print_note(job::format_warning(warning));
  }

  void on_rank_health(const job::health::RankHealth& health) {
    if (rank_states_.add(health) && !verdict_) print_warning(stall_warning(health, locations_, limits_));
    if (verdict_ || stop_signal_ != 0 || snapshots_requested_) return;
    const bool is_last = health.rank == static_cast<int>(locations_.size()) - 1;  // each second, all ranks report
    if (const auto straggler = is_last ? rank_states_.find_straggler() : std::nullopt)
      print_warning(straggler_warning(*straggler, rank_states_.health(), locations_));
    finding_ = rank_states_.find_hang();
    if (finding_) request_snapshots();
  }

  /// Returns the verdict on a hang. A cause that a rank has published takes precedence.
  Verdict hang_verdict(const std::vector<base::telemetry::RankSnapshot>& ranks) {
    Verdict verdict =
        judge_hang(*finding_, rank_states_.health(), ranks, {limits_, run_dir_, locations_, own_errors_or_none()});
    if (auto published = cause_of_exits().published()) {
      verdict.fatal = std::move(*published);
      verdict.exit_code = base::exit_code(verdict.fatal.cause);
    }
    return verdict;
  }

  void send_stop(const protocol::StopRequest& request) {
    broadcast(Kind::kStop, protocol::encoded(request));
    if (stop_at_.is_never()) stop_at_ = Deadline::in(request.notice_period);
    const auto stacks = verdict_ && !verdict_->stacks.empty() ? base::kStackWait : 0s;
    for (hosts::AgentLink& agent : agents_)
      agent.kill_after(Deadline::in(stacks + request.notice_period + request.grace + base::kAgentExitTimeout));
  }

  /// Starts the ranks when all agents are ready, so that nothing runs if one of them refuses.
  void on_prepared(std::size_t agent, const std::string& warnings) {
    for (const std::string& warning : base::split(warnings, '\n'))
      if (!warning.empty() && warnings_.insert(warning).second)
        output_->print_note("warning: " + base::telemetry::printable(warning) +
                            (nodes_.size() > 1 && !nodes_[agent].is_local ? " (on " + nodes_[agent].name + ")" : ""));
    if (++num_prepared_ < agents_.size() || verdict_) return;
    broadcast(Kind::kStart);
    stdin_.start();
  }

  /// Stops the ranks for the user: Python's KeyboardInterrupt, and then perhaps a checkpoint.
  void stop_ranks(int signal) {
    if (signal == SIGINT) output_->hide_interrupts();
    send_stop({.signal = signal, .grace = options_.grace});
  }

  /// After Ctrl-\ (SIGQUIT): writes the stacks of all ranks, and then stops them.
  void stop_with_stacks() {
    output_->print_note("writing the stacks of all ranks, and stopping them");
    conclude(judge_quit(static_cast<int>(locations_.size()), run_dir_, nodes_.size() > 1));
    broadcast(Kind::kWriteStacks, protocol::encode_ranks(verdict_->stacks));
    send_stop({.signal = SIGTERM, .grace = options_.fail_grace});
  }

  /// The reader of our output has ended, as with `| head -1`: nobody needs the rest.
  void on_reader_closed() {
    if (verdict_ || stop_signal_ != 0) return;
    stop_signal_ = SIGPIPE;
    output_->allow_drops();
    conclude(judge_user_stop(SIGPIPE));
    stop_ranks(SIGINT);
  }

  /// Lets the agents read more of the output that has reached its destination.
  void send_acks() {
    for (const output::OutputAck& ack : output_->acks().take()) {
      std::size_t agent = 0;
      for (int first = nodes_[0].ranks; first <= ack.rank; first += nodes_[++agent].ranks) {
      }
      agents_[agent].send(
          {Kind::kOutputAck, ack.rank,
           protocol::encode_numbers({static_cast<int>(ack.stream), static_cast<std::int64_t>(ack.bytes)})});
    }
  }

  void broadcast(Kind kind, const std::string& payload = {}) {
    for (hosts::AgentLink& agent : agents_) agent.send({kind, -1, payload});
  }

  /// Called at the end of an agent's output. Without kDone, the agent was killed or its host is unreachable. The kernel
  /// has killed the ranks of an agent on this host; their children are now this process's, which kills them.
  void on_agent_lost(std::size_t index) {
    const protocol::RankExit end = agents_[index].reap();
    awaited_snapshots_.erase(index);
    stdin_.on_agent_lost(index);
    status_.on_agent_end(index, done_agents_.contains(index));
    if (snapshots_requested_ && awaited_snapshots_.empty()) on_snapshots();  // with the snapshots that arrived before
    if (done_agents_.contains(index)) return;
    mark_host_lost(index);
    outcome_.has_unreachable_host |= !nodes_[index].is_local;
    kill_all(judge_lost_agent({.host = agents_[index].host(),
                               .is_local = nodes_[index].is_local,
                               .via = agents_[index].via(),
                               .end = end,
                               .text = agents_[index].stderr_text()}));
    if (nodes_[index].is_local && std::ranges::count(nodes_, true, &plan::Node::is_local) == 1)
      for (const pid_t pid : process::kill_descendants(inherited_children_, Deadline::in(base::kUnkillableTimeout)))
        on_unkillable(index, -1, pid);
  }

  CauseOfExits cause_of_exits() { return {store_->store(), *output_, locations_, exits_}; }

  void conclude(Verdict verdict) {
    if (!verdict_) verdict_ = std::move(verdict);
  }

  void kill_all(Verdict verdict) {
    conclude(std::move(verdict));
    send_stop({.signal = SIGKILL});
  }

  process::EventLoop loop_;
  const cli::RunOptions options_;
  const std::vector<pid_t> inherited_children_;
  const int signals_;
  const int generation_;
  std::vector<hosts::AgentLink> agents_;
  const std::vector<plan::Node> nodes_;  // one per agent
  std::vector<protocol::RankLocation> locations_;
  std::unique_ptr<output::Output> output_;
  StdinForwarder stdin_;
  StatusService status_;
  const std::string run_dir_;
  std::optional<job::StoreServer> store_;
  const job::health::HealthLimits limits_;
  std::size_t num_prepared_ = 0;    // agents that are ready to start their ranks
  std::set<std::string> warnings_;  // that have been printed
  std::vector<protocol::RankExit> exits_;
  RankStates rank_states_;
  std::optional<job::health::HangFinding> finding_;  // the hang because of which snapshots were requested
  bool snapshots_requested_ = false;                 // after the first failure or hang
  Deadline snapshot_deadline_ = Deadline::never();
  Deadline stop_at_ = Deadline::never();     // when agents send the signal to stop
  std::set<std::size_t> awaited_snapshots_;  // agents whose snapshots are awaited
  int stop_signal_ = 0;                      // the user's signal
  Deadline decide_at_ = Deadline::never();   // when the first failure is judged
  Deadline culprit_deadline_ = Deadline::never();
  std::optional<Verdict> verdict_;     // later failures do not replace it
  std::set<std::size_t> done_agents_;  // agents that reported that no process is left
  JobOutcome outcome_;
};

}  // namespace

JobOutcome supervise(const cli::RunOptions& options, PreparedJob job, int signals,
                     const std::vector<pid_t>& inherited_children) {
  return Supervisor(options, std::move(job), signals, inherited_children).run();
}

}  // namespace lockstep::launcher::supervise
