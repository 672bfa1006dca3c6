// DeadlockDetector: explains why a wait is long. Ranks that wait publish their operations in the store, so two ranks
// that wait for each other in different operations get a DesyncError within about a second instead of a timeout.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/channel/wait_record.h"
#include "lockstep/comm/interface/pending.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::channel {

class HostWatch;
class SerialExecutor;

/// The operation in which a rank waits.
struct WaitInfo {
  std::string channel;                                ///< the same name on all members
  std::uint64_t seq = 0;                              ///< number of the operation on the channel
  std::string label;                                  ///< "all_reduce(fc.weight)#12"
  std::string text;                                   ///< "all_reduce(float32[1024])"
  const std::vector<int>* members;                    ///< world ranks that must take part
  bool any_member = false;                            ///< one of them, other than this one, suffices
  base::Deadline deadline = base::Deadline::never();  ///< bounded: by the DeadlockDetector
  std::string_view hint = {};                         ///< of a DesyncError; empty: that for calls in general
};

/// Bounds and explains the waits of one process in one world. The fast path is record_start(). All other work happens
/// in waits of more than 200 ms and after failures. Any thread may call any function.
///
/// Deadlock: ranks A and B wait for each other if A is blocked in operation s of channel X, B is blocked in operation t
/// of channel Y, B has not started s and A has not started t. Each rank publishes its operation, the number of
/// operations that it has started on each channel, and a beat that changes only while the rank is blocked. A beat that
/// changed between two polls proves that B was blocked while A was blocked; neither can ever continue.
///
/// Blocked: a process is blocked if none of its threads can start another operation. The detector can establish that
/// only if a single thread has ever started operations and that thread waits, either in an operation or for a
/// SerialExecutor that runs an asynchronous one. Threads that are a BackgroundThread do not count. A rank that waits
/// for any one of several ranks is in no deadlock that two ranks can see. An asynchronous operation that no thread
/// waits for blocks nothing. In a process in which several threads start operations, blocking cannot be detected; such
/// waits end at their deadlines.
///
/// Timeout: a wait also ends when the ranks that it depends on have made no progress for the limit. These are the ranks
/// that have not started its operation, and, if they wait themselves, the ranks that they wait for. Once all ranks have
/// started the operation, it depends on all of them. Then only the transport hierarchy reports progress between hosts,
/// chunk by chunk; with other transports, an operation that takes longer than the limit ends with a TimeoutError. A
/// rank that computes, evaluates or saves for a long time is not at fault while it makes progress
/// (job/health/heartbeat.h).
class DeadlockDetector {
 public:
  /// `limit` 0 means no timeout. `remote_ranks` are the ranks on other hosts, for error messages.
  DeadlockDetector(std::shared_ptr<job::Store> store, int rank, std::string host, std::chrono::milliseconds limit,
                   std::vector<int> remote_ranks = {});
  ~DeadlockDetector();

  /// From now on, long waits also examine the connections to other hosts, and end with kPeerUnreachable if one is lost.
  /// Call it before the first wait.
  void watch_hosts(std::unique_ptr<HostWatch> host_watch);

  /// The number of operations that this rank has started on a channel. Valid as long as the DeadlockDetector exists.
  using StartCounter = std::atomic<std::uint64_t>;
  StartCounter& start_counter(const std::string& channel);
  /// For the page while this thread is blocked in a wait that has lasted for some time; see BlockedThread. Empty for
  /// threads whose waits do not block the program: those of a SerialExecutor and a BackgroundThread.
  static void show_blocked(std::optional<base::telemetry::BlockedThread>& blocked);

  /// Records that this thread has started operation `seq` of the channel that `count` belongs to. The store has release
  /// order; threads that publish the counters load them with acquire order.
  void record_start(StartCounter& count, std::uint64_t seq) {
    count.store(seq, std::memory_order_release);
    if (last_starting_thread_.load(std::memory_order_relaxed) != acting_thread()) add_starting_thread();
  }

  /// While an instance exists, this thread works for `thread`, which waits for it: operations that this thread starts
  /// count as operations of `thread`. Autograd's threads act for the thread that called backward().
  class ActingForThread {
   public:
    explicit ActingForThread(std::thread::id thread) : thread_(thread), before_(std::exchange(acting_for_, &thread_)) {}
    ~ActingForThread() { acting_for_ = before_; }
    ActingForThread(const ActingForThread&) = delete;
    ActingForThread& operator=(const ActingForThread&) = delete;

   private:
    const std::thread::id thread_;
    const std::thread::id* const before_;
  };

  /// While an instance exists, this thread starts operations only on channels that no other kind of thread uses: its
  /// waits cannot block other threads, and its future operations cannot unblock them.
  class BackgroundThread {
   public:
    BackgroundThread() { is_background_thread_ = true; }
    ~BackgroundThread() { is_background_thread_ = false; }
    BackgroundThread(const BackgroundThread&) = delete;
    BackgroundThread& operator=(const BackgroundThread&) = delete;
  };

  /// While an instance exists, this thread waits for operations of a device, for which the program waits when it next
  /// synchronizes with the device, using a core: such a process counts as waiting (RankPage::waiting), although it
  /// could start other operations.
  class DeviceThread {
   public:
    DeviceThread() { is_device_thread_ = true; }
    ~DeviceThread() { is_device_thread_ = false; }
    DeviceThread(const DeviceThread&) = delete;
    DeviceThread& operator=(const DeviceThread&) = delete;
  };

  /// While an instance exists, this thread waits without a limit of its own for `pending`, which is queued on
  /// `executor`.
  class ExecutorWait {
   public:
    ExecutorWait(DeadlockDetector& deadlock_detector, const SerialExecutor* executor, PendingPtr pending);
    ~ExecutorWait();
    ExecutorWait(const ExecutorWait&) = delete;
    ExecutorWait& operator=(const ExecutorWait&) = delete;

   private:
    DeadlockDetector& deadlock_detector_;
  };

  /// What one wait has observed so far.
  struct PollState {
    std::map<int, std::uint64_t> peer_beats;
    // When the ranks that this wait depends on last made progress; initially the time of the first poll.
    base::Deadline::Clock::time_point last_progress{};
    base::Deadline::Clock::time_point last_poll{};
    std::string progress;                                             // of those ranks, as of last_progress
    std::map<int, base::Deadline::Clock::time_point> closed_since;    // when a connection was first found closed
    std::optional<base::Deadline::Clock::time_point> all_left_since;  // of a wait for any member
    bool is_published = false;
    bool is_blocking = false;  // the published record says that this wait blocks the process
    std::optional<base::telemetry::BlockedThread> blocked = {};  // while this wait blocks a thread of the program
    bool poll_soon = false;  // a peer may be in a deadlock with this rank; one more poll decides
  };
  /// A long wait calls it repeatedly. Returns if the wait may continue. Throws DesyncError, CommError (kUnevenInput),
  /// TimeoutError, or the job's first cause if there is one. May block for a store request.
  void poll(const WaitInfo& wait_info, PollState& poll_state);
  /// Returns whether the agent reports that the job has failed; then the next poll() reads the cause. One atomic load.
  static bool job_has_failed();
  /// Records that the wait has ended.
  void end_wait(PollState& poll_state) noexcept;

  /// Throws a TimeoutError that names the absent ranks, for a wait that has reached its deadline or limit. If the wait
  /// was too short for a poll, first blocks for up to 300 ms so that the other ranks can publish their waits.
  [[noreturn]] void throw_timeout(const WaitInfo& wait_info, PollState& poll_state);

  /// Throws the reason why a connection of the transport failed with `text`: a first cause, or a peer that died or
  /// left. If none is found within a second, throws the transport's own text with its `hint`.
  [[noreturn]] void throw_transport_failure(const WaitInfo& wait_info, const std::string& text,
                                            const std::string& hint = {});

  /// Publishes `error` as the job's first cause unless there is one.
  void publish_failure(const base::CommError& error) noexcept;

  /// Publishes that this rank cannot continue because of `text`, as the job's first cause unless there is one, or, if
  /// it `led_to_cause`, in the place of that one.
  void publish_failure(base::Cause cause, const std::string& text, const std::string& hint,
                       bool led_to_cause = false) noexcept;

  /// Publishes that this rank will not finish the operations that it started on `channel`. `text` is the reason, `peer`
  /// the rank at fault (-1: unknown).
  void abandon(const std::string& channel, int peer, const std::string& text) noexcept;

  /// Publishes that this rank closes its world without an error. Not called while an error unwinds the stack, because
  /// then the exit status of the process is more informative.
  void leave() noexcept;

  int rank() const { return rank_; }

 private:
  static std::thread::id acting_thread() { return acting_for_ ? *acting_for_ : std::this_thread::get_id(); }
  inline static constinit thread_local const std::thread::id* acting_for_ = nullptr;
  inline static constinit thread_local bool is_background_thread_ = false;
  inline static constinit thread_local bool is_device_thread_ = false;
  void add_starting_thread();
  base::Deadline store_limit(const WaitInfo& wait_info) const;
  std::optional<WaitRecord> read_record(const std::string& key, const WaitInfo& wait_info);
  bool is_blocked_locked() const;
  std::string record();
  void publish_record(const WaitInfo& wait_info, PollState& poll_state);
  void throw_first_cause(const WaitInfo& wait_info);
  void throw_if_abandoned(const WaitInfo& wait_info);
  void check_peer(const WaitInfo& wait_info, int peer, PollState& poll_state);
  void check_left(const WaitInfo& wait_info, int peer);
  void check_all_left(const WaitInfo& wait_info, PollState& poll_state);
  void poll_store(const WaitInfo& wait_info, PollState& poll_state);
  void check_hosts(const WaitInfo& wait_info);
  void check_exited(const WaitInfo& wait_info, int peer, bool accept_clean_exit);
  void check_closed(const WaitInfo& wait_info, int peer, PollState& poll_state);
  void check_progress(const WaitInfo& wait_info, PollState& poll_state);
  std::string read_awaited_progress(const WaitInfo& wait_info);
  std::vector<int> find_absent_ranks(const WaitInfo& wait_info);

  std::shared_ptr<job::Store> store_;
  const int rank_;
  const std::string host_;
  const std::chrono::milliseconds progress_limit_;
  const std::vector<int> remote_ranks_;
  std::unique_ptr<HostWatch> host_watch_;  // null on one host
  std::atomic<std::thread::id> last_starting_thread_{};
  std::mutex mutex_;  // guards the members below
  std::map<std::string, StartCounter> start_counters_;
  std::set<std::thread::id> starting_threads_;           // threads that have called record_start()
  const SerialExecutor* executor_waited_for_ = nullptr;  // by an ExecutorWait
  PendingPtr pending_waited_for_;
  std::optional<WaitRecord> blocking_wait_;  // the wait that blocks the process, as published; without `started`
  std::uint64_t beat_ = 0;
};

}  // namespace lockstep::comm::channel
