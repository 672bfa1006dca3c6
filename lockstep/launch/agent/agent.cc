#include "lockstep/launch/agent/agent.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/agent/agent_setup.h"
#include "lockstep/launch/agent/output_forwarder.h"
#include "lockstep/launch/agent/rank_monitor.h"
#include "lockstep/launch/agent/rank_process.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/activity.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/python_stacks.h"
#include "lockstep/launch/process/spawn.h"
#include "lockstep/launch/process/stack_dump.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/slurm/step_task.h"

namespace lockstep::launcher::agent {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr std::array kLibraryChecks = {2, 5, 10, 20, 40};  // numbers of health reports, which are one second apart
/// Processes that end with their rank, such as the resource tracker of Python's multiprocessing, have this time.
constexpr auto kSelfExitTime = 300ms;
constexpr auto kKillRetryInterval = 50ms;  // a process may fork between the scan of /proc and the signal

class Agent {
 public:
  explicit Agent(const cli::AgentOptions& options) : options_(options) {}

  int run() {
    signals_ = process::make_signal_fd(options_.in_pod ? process::handled_signals() : std::vector<int>{SIGCHLD});
    process::become_subreaper();
    failures_ = base::make_pipe();
    base::set_nonblocking(failures_.read.get());
    std::optional<AgentSetup> setup = set_up_agent(input_);
    if (!setup) return 0;
    base::set_nonblocking(STDIN_FILENO);
    base::set_nonblocking(STDOUT_FILENO);
    liveness_fd_ = std::move(setup->liveness_fd);
    status_responder_.emplace(setup->job.label);
    watch_events();
    prepared_job_ = prepare(std::move(setup->job));
    while (prepared_job_) poll_once();
    reap_children();
    while (has_children_) poll_once();

    output_.forward_rest();
    queue_frame(Kind::kDone, -1);
    // bounded: the launcher reads the queue, or it is lost
    while (!launcher_lost_ && queue_.flush() && !queue_.empty()) poll_once();
    return 0;
  }

 private:
  using Kind = protocol::FrameKind;

  /// Completes the plan with facts about this host: the working directory, the path of a staged program, and the
  /// agent's own environment. Checks what can be checked before any rank runs. Queues a kPrepared frame or, on an
  /// error, a kRefused frame.
  std::optional<plan::JobPlan> prepare(plan::JobPlan job) {
    try {
      process::check_proc();
      if (!job.directory.empty() && ::chdir(job.directory.c_str()) != 0)
        throw base::SystemError("cannot change to directory " + base::quoted(job.directory, 256), errno);
      if (const auto& file = base::Env::this_process().lockstep_key_file; options_.in_pod && file)
        job.key = job::JobKey::from_file(*file);
      use_staged_files(job, options_);
      if (job.extends_own_environment)
        job.environment = process::remove_variables(
            process::merge_environment(process::current_environment(), job.environment), job.ranks.front().environment);
      std::string warnings = add_python_hook(job, options_.staged_hook);
      if (!warnings.empty()) warnings += "\n";
      if (liveness_fd_) check_interfaces(job.environment);
      process::check_startable(job.program);
      for (const std::string& warning : plan::check_variables(job.environment)) warnings += warning + "\n";
      queue_frame(Kind::kPrepared, -1, std::move(warnings));
      return job;
    } catch (const base::Error& error) {
      queue_frame(Kind::kRefused, -1, protocol::encode_texts({error.what(), error.hint()}));
      return std::nullopt;
    }
  }

  void start_ranks(const plan::JobPlan& job) {
    fail_grace_ = job.fail_grace;
    run_dir_ = job.run_dir;
    measures_activity_ = job.measures_activity;
    output_.set_window(job.output_window);
    rank_health_at_ = Deadline::in(base::kRankHealthInterval);
    const std::uint64_t max_files = base::raise_fd_limit(4 * job.ranks.size() + 64);
    const base::Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (const plan::RankPlan& plan : job.ranks) {
      try {
        start_rank(job, plan, null.get(), max_files);
      } catch (const base::SystemError& error) {
        queue_frame(Kind::kStartFailed, plan.rank,
                    protocol::encode_numbers({static_cast<int>(process::StartStep::kFork), error.error_number()}));
        stop({.signal = SIGKILL});
        return;
      }
    }
  }

  void start_rank(const plan::JobPlan& job, const plan::RankPlan& plan, int null, std::uint64_t max_files) {
    base::Pipe in = plan.reads_stdin ? base::make_pipe() : base::Pipe();
    base::Pipe out = base::make_pipe();
    base::Pipe err = base::make_pipe();
    RankProcess process{.rank = plan.rank, .monitor = RankMonitor(plan.rank, job.key)};
    const int page = process.monitor.descriptor();
    process.pid = process::spawn({.path = job.program,
                                  .argv = rank_argv(job, plan),
                                  .environment = rank_environment(job, plan, page, error_files_.path(plan.rank)),
                                  .in = in.read ? in.read.get() : null,
                                  .out = out.write.get(),
                                  .err = err.write.get(),
                                  .inherited = page,
                                  .cpus = plan.cpus,
                                  .max_files = max_files,
                                  .failure = failures_.write.get(),
                                  .id = plan.rank});
    process.session = process.pid;
    output_.add_rank(plan.rank, {std::move(out.read), std::move(err.read)});
    if (in.write) stdin_.add_rank(std::move(in.write));
    queue_frame(Kind::kStarted, plan.rank, protocol::encode_numbers({process.pid}));
    ranks_.push_back(std::move(process));
    ++num_running_;
  }

  void write_stdin() {
    if (stdin_.flush()) queue_frame(Kind::kStdinTaken, -1);
  }

  void watch_events() {
    loop_.on_readable([this] { return launcher_lost_ ? -1 : STDIN_FILENO; }, [this] { read_input(); });
    // No data is sent on this connection, so it has ended.
    loop_.on_readable([this] { return launcher_lost_ ? -1 : liveness_fd_.get(); }, [this] { on_launcher_lost(); });
    loop_.on_readable([this] { return status_responder_->fd(); },
                      [this] { status_responder_->reply(rank_statuses()); });
    loop_.on_readable([this] { return signals_.get(); }, [this] { reap_children(); });
    loop_.on_writable([this] { return launcher_lost_ || queue_.empty() ? -1 : STDOUT_FILENO; },
                      [] {});  // poll_once() writes
    loop_.at([this] { return rank_health_at_; },
             [this] {
               send_rank_health();
               rank_health_at_ = Deadline::in(base::kRankHealthInterval);
             });
    loop_.at([this] { return dumps_end_at_; }, [this] { on_dump_end(); });
    loop_.at([this] { return signal_at_; },
             [this] {
               signal_at_ = Deadline::never();
               signal_ranks(ranks_, signal_, true);
             });
    loop_.at([this] { return end_left_behind_at_; }, [this] { end_left_behind(); });
    loop_.at([this] { return kill_at_; }, [this] { kill_job(); });
    loop_.at([this] { return give_up_at_; }, [this] { give_up(); });
  }

  void poll_once() {
    loop_.run_once();
    if (!launcher_lost_ && !queue_.flush()) on_launcher_lost();
  }

  void read_input() {
    char bytes[4096];
    const ssize_t size = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) return on_launcher_lost();
    if (size > 0) input_.feed({bytes, static_cast<std::size_t>(size)});
    while (const auto frame = input_.next()) handle_frame(*frame);
  }

  void handle_frame(const protocol::Frame& frame) {
    switch (frame.kind) {
      case Kind::kStart:
        if (const auto job = std::exchange(prepared_job_, std::nullopt)) start_ranks(*job);
        break;
      case Kind::kStop: prepared_job_.reset(); return stop(protocol::decoded<protocol::StopRequest>(frame.payload));
      case Kind::kSnapshotRequest: send_snapshots(); return queue_frame(Kind::kSnapshotsDone, -1);
      case Kind::kStatusRequest:
        for (const protocol::RankStatus& rank : rank_statuses())
          queue_frame(Kind::kRankStatus, rank.rank, protocol::encode_rank_status(rank));
        return queue_frame(Kind::kStatusDone, -1);
      case Kind::kWriteStacks: return write_stacks(protocol::decode_ranks(frame.payload));
      case Kind::kSignal:
        return forward_signal(ranks_, static_cast<int>(protocol::decode_numbers(frame.payload, 1)[0]));
      case Kind::kOutputAck: {
        const auto numbers = protocol::decode_numbers(frame.payload, 2);
        return output_.acknowledge(frame.rank, static_cast<std::size_t>(numbers[0]),
                                   static_cast<std::size_t>(numbers[1]));
      }
      case Kind::kStdin: stdin_.write(frame.payload); return write_stdin();
      default: protocol::throw_unexpected(frame.kind);
    }
  }

  void reap_children() {
    while (const auto signal = process::read_signal(signals_.get()))
      if (*signal != SIGCHLD) queue_frame(Kind::kSignalled, -1, protocol::encode_numbers({*signal}));
    for (;;) {
      const auto reaped = process::try_reap();
      has_children_ = reaped.has_value();
      if (!reaped || reaped->pid == 0) break;
      for (std::size_t index = 0; index < ranks_.size(); ++index)
        if (ranks_[index].pid == reaped->pid) on_rank_exit(index, reaped->status);
      std::erase_if(dumps_, [&](const process::StackDump& dump) { return dump.tool() == reaped->pid; });
    }
    if (num_running_ == 0 && has_children_ && !std::exchange(lingering_, true)) {
      const bool any_succeeded = std::ranges::any_of(ranks_, &RankProcess::succeeded);
      end_left_behind_at_ = Deadline::in(any_succeeded && kill_at_.is_never() ? kSelfExitTime : 0ms);
    }
    if (dumps_.empty()) on_dump_end();
  }

  void on_rank_exit(std::size_t index, int status) {
    RankProcess& process = ranks_[index];
    process::StartFailure failure;
    while (::read(failures_.read.get(), &failure, sizeof failure) == static_cast<ssize_t>(sizeof failure))
      queue_frame(Kind::kStartFailed, failure.id,
                  protocol::encode_numbers({static_cast<int>(failure.step), failure.error}));
    output_.forward_written(index);  // its children may keep the pipes open and write without end
    protocol::RankExit end{.rank = process.rank, .pid = process.pid};
    if (WIFSIGNALED(status))
      end.signal = WTERMSIG(status);
    else
      end.code = WEXITSTATUS(status);
    end.message = error_files_.take_message(process.rank);
    end.ports = process.monitor.tcp_ports();
    if (end.signal == SIGKILL) end.oom_kills = count_oom_kills() - initial_oom_kills_;
    // Send snapshots now: when the launcher requests them, the other ranks may have exited.
    if (end.failed() && !std::exchange(any_failed_, true)) send_snapshots();
    send_saved_checkpoint(process);
    queue_frame(Kind::kRankExited, process.rank, protocol::encoded(end));
    if (process.deferred_signal != 0) ::kill(-process.session, process.deferred_signal);
    process.succeeded = end.exit_code() == 0 || end.exit_code() == base::exit_code(base::Cause::kPreempted);
    process.pid = -1;
    --num_running_;
  }

  /// Schedules the end of the job. SIGKILL is sent to every process of the job. Any other signal is sent by
  /// signal_ranks(), and SIGKILL follows after the grace period. SIGINT is followed by SIGTERM after half of that time.
  void stop(const protocol::StopRequest& request) {
    if (request.signal != SIGKILL && !dumps_.empty()) {
      stop_after_dumps_ = request;
      return;
    }
    kill_at_ = earlier(kill_at_, Deadline::in(request.signal == SIGKILL ? 0ms : request.notice_period + request.grace));
    if (request.signal == SIGKILL) return;
    if (request.notice_period > 0ms)
      for (RankProcess& process : ranks_) process.monitor.notify_failure();
    signal_ranks(ranks_, request.signal, request.notice_period == 0ms);
    signal_ = request.signal == SIGINT ? SIGTERM : request.signal;
    if (request.signal == SIGINT) signal_at_ = Deadline::in(request.grace / 2);
    if (request.notice_period > 0ms) signal_at_ = Deadline::in(request.notice_period);
  }

  void send_rank_health() {
    const auto now = job::health::StallTimer::Clock::now();
    std::optional<process::HostActivity> activity;
    for (std::size_t index = 0; index < ranks_.size(); ++index) {
      RankProcess& process = ranks_[index];
      process.monitor.set_output_blocked(output_.is_blocked(index));
      if (process.pid > 0) {
        job::health::RankHealth health = process.monitor.health(process.pid, now);
        if (measures_activity_ || process.monitor.needs_activity()) {
          if (!activity) activity = process::read_activity();
          process.monitor.add_activity(process.pid, *activity, now, health);
        }
        queue_frame(Kind::kRankHealth, process.rank, protocol::encoded(health));
      }
      send_saved_checkpoint(process);
    }
    if (queue_.empty()) queue_frame(Kind::kAlive, -1);
    check_for_foreign_library();
  }

  /// Reports once that the ranks use mpi4py or Horovod. Programs load these when they start.
  void check_for_foreign_library() {
    ++num_health_reports_;
    if (has_foreign_library_ || std::ranges::find(kLibraryChecks, num_health_reports_) == kLibraryChecks.end()) return;
    const std::string_view found = find_foreign_library(process::descendants());
    has_foreign_library_ = !found.empty();
    if (has_foreign_library_) queue_frame(Kind::kUsesLibrary, -1, std::string(found));
  }

  void send_snapshots() {
    for (const RankProcess& process : ranks_)
      if (const auto snapshot = process.monitor.snapshot())
        queue_frame(Kind::kSnapshot, process.rank, protocol::encode_snapshot(*snapshot));
  }

  std::vector<protocol::RankStatus> rank_statuses() const {
    std::vector<protocol::RankStatus> statuses;
    for (const RankProcess& process : ranks_) statuses.push_back(process.monitor.status(process.pid));
    return statuses;
  }

  /// Reports a newer checkpoint. Called every second and after each exit of a rank, because the whole host may be lost
  /// at any time.
  void send_saved_checkpoint(const RankProcess& process) {
    const std::int64_t saved = process.monitor.durable_checkpoint();
    if (saved <= last_saved_) return;
    last_saved_ = saved;
    queue_frame(Kind::kCheckpointSaved, process.rank, protocol::encode_numbers({saved}));
  }

  void write_stacks(const std::vector<int>& ranks) {
    const Deadline short_end = Deadline::in(base::kPythonDumpTimeout), long_end = Deadline::in(base::kStackDumpTimeout);
    bool all_have_python = true;
    const auto python_deadline = Deadline::in(base::kPythonStackTimeout);
    const std::vector<pid_t> descendant_pids = process::descendants();
    const std::map<pid_t, process::ProcessCounters> processes = process::read_processes();
    for (const RankProcess& process : ranks_) {
      if (process.pid <= 0 || std::ranges::find(ranks, process.rank) == ranks.end()) continue;
      const pid_t page_pid = process.monitor.pid(process.pid);  // untrusted: the rank can write its page
      const bool is_ours = std::ranges::find(descendant_pids, page_pid) != descendant_pids.end();
      const std::string python = process::read_python_stacks(process::tree_of(process.pid, processes), python_deadline);
      if (const std::string place = process::python_location(python); !place.empty())
        queue_frame(Kind::kPythonLocation, process.rank, place);
      try {
        process::StackDump dump(process.rank, is_ours ? page_pid : process.pid, run_dir_, python);
        if (dump.tool() > 0) dumps_.push_back(std::move(dump));
        all_have_python &= !python.empty();
      } catch (const base::Error& error) {  // as in a folder that is read-only: the launcher prints them
        constexpr std::size_t kMaxBytes = std::size_t{64} << 10;
        queue_frame(Kind::kStacks, process.rank, std::string(error.what()) + "\n" + python.substr(0, kMaxBytes));
      }
    }
    dumps_end_at_ = all_have_python ? short_end : long_end;
  }

  /// Ends the processes that the ranks have left behind.
  void end_left_behind() {
    end_left_behind_at_ = Deadline::never();
    if (kill_at_.is_never())
      for (const auto& [rank, processes] : find_left_behind(ranks_)) queue_frame(Kind::kLeftBehind, rank, processes);
    for (const pid_t pid : process::descendants()) ::kill(pid, SIGTERM);
    kill_at_ = earlier(kill_at_, Deadline::in(fail_grace_));
  }

  /// All stacks have been written, or the time for it is over.
  void on_dump_end() {
    dumps_end_at_ = Deadline::never();
    for (process::StackDump& dump : dumps_) dump.give_up();
    dumps_.clear();
    if (stop_after_dumps_) stop(*std::exchange(stop_after_dumps_, std::nullopt));
  }

  void kill_job() {
    for (const pid_t pid : process::descendants()) ::kill(pid, SIGKILL);
    if (give_up_at_.is_never()) give_up_at_ = Deadline::in(base::kUnkillableTimeout);
    kill_at_ = Deadline::in(kKillRetryInterval);
  }

  /// Reports the processes that SIGKILL did not end.
  void give_up() {
    give_up_at_ = Deadline::never();
    if (!std::exchange(has_children_, false)) return;
    for (const RankProcess& process : ranks_)
      if (process.pid > 0) queue_frame(Kind::kUnkillable, process.rank, protocol::encode_numbers({process.pid}));
    if (num_running_ == 0)
      for (const pid_t pid : process::descendants())
        queue_frame(Kind::kUnkillable, -1, protocol::encode_numbers({pid}));
  }

  void on_launcher_lost() {
    if (std::exchange(launcher_lost_, true)) return;
    prepared_job_.reset();
    stop({.signal = SIGKILL});
  }

  void queue_frame(Kind kind, int rank, std::string payload = {}) { queue_.push({kind, rank, std::move(payload)}); }

  process::EventLoop loop_;
  base::Fd signals_;
  protocol::FrameReader input_{protocol::kMaxJobFrameBytes};
  FrameQueue queue_{STDOUT_FILENO};
  OutputForwarder output_{loop_, queue_};
  StdinWriter stdin_{loop_, [this] { write_stdin(); }};
  base::Fd liveness_fd_;
  std::optional<StatusResponder> status_responder_;
  base::Pipe failures_;
  std::optional<plan::JobPlan> prepared_job_;  // until kStart
  std::vector<RankProcess> ranks_;
  std::size_t num_running_ = 0;  // ranks with a pid
  bool has_children_ = true;     // any child, started here or inherited
  bool lingering_ = false;       // all ranks have exited, but processes that they started have not
  bool launcher_lost_ = false;
  const std::int64_t initial_oom_kills_ = count_oom_kills();
  int num_health_reports_ = 0;
  bool has_foreign_library_ = false;
  bool any_failed_ = false;  // a rank has failed
  const ErrorFiles error_files_;
  std::chrono::milliseconds fail_grace_{0};
  const cli::AgentOptions options_;
  std::string run_dir_;
  bool measures_activity_ = false;
  std::vector<process::StackDump> dumps_;  // in progress
  std::optional<protocol::StopRequest> stop_after_dumps_;
  std::int64_t last_saved_ = 0;  // the newest checkpoint reported to the launcher
  int signal_ = 0;               // to be sent at signal_at_
  Deadline rank_health_at_ = Deadline::never();
  Deadline dumps_end_at_ = Deadline::never();
  Deadline signal_at_ = Deadline::never();
  Deadline end_left_behind_at_ = Deadline::never();
  Deadline kill_at_ = Deadline::never();
  Deadline give_up_at_ = Deadline::never();
};

}  // namespace

int agent_main(const cli::AgentOptions& options) {
  ::prctl(PR_SET_DUMPABLE, 0);
  try {
    const base::Fd task =
        options.slurm_step.empty()
            ? base::Fd()
            : slurm::connect_to_task(options.slurm_step);  // the guard inherits it and outlives the agent
    if (options.guarded) fork_guarded_agent();
    return Agent(options).run();
  } catch (const base::Error& error) {
    const std::string line = std::string("lockstep agent: ") + error.what() + "\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
    return base::exit_code(error.cause());
  }
}

}  // namespace lockstep::launcher::agent
