// Why is this wait long? Ranks that wait tell each other, through the store, in what; two that wait for each other in
// different operations are a DESYNC at once, not a timeout in five minutes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/interface/pending.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

class SerialExecutor;

/// An operation that a rank waits in.
struct WaitInfo {
  std::string channel;                                ///< the same name on all members
  std::uint64_t seq = 0;                              ///< its number there
  std::string label;                                  ///< "all_reduce(fc.weight)#12"
  std::string text;                                   ///< "all_reduce(float32[1024])"
  const std::vector<int>* members;                    ///< world ranks that must take part
  base::Deadline deadline = base::Deadline::never();  ///< bounded: by the DeadlockDetector
};

/// One a process and world. The quick path is started(). Everything else happens only in waits of
/// more than 200 ms and after failures. Any thread.
///
/// Two ranks A and B wait for each other when A is blocked in operation s of channel X, B in operation t of channel Y,
/// B has not started s and A has not started t. Each publishes (operation, counts of started operations, a beat that
/// moves only while it is blocked); a beat that moved between two looks proves that B was blocked while A was, which
/// then can never end.
///
/// A process is blocked when no thread of it can start another operation: it has one thread that ever started one, and
/// that thread waits, in an operation itself or for the lane of an asynchronous one; threads that are BackgroundThread
/// do not count. An asynchronous operation that nobody waits for blocks nothing, and of a process in which several
/// threads start operations it is not known: such waits end at their deadlines.
///
/// A wait also ends when its limit has passed since anybody got on of whom it depends: the ranks that have not come to
/// its operation, and, of those that wait themselves, whom they wait for; once all have come, any of them, as long
/// operations get on piece by piece (between hosts over the transport hierarchy; elsewhere one that takes longer than
/// the limit ends). One that computes, evaluates or saves for long is not at fault while it gets on (job/heartbeat.h).
class DeadlockDetector {
 public:
  /// `limit` 0: such waits never end. `far`: the ranks of other hosts, for messages.
  DeadlockDetector(std::shared_ptr<job::Store> store, int rank, std::string host, std::chrono::milliseconds limit,
                   std::vector<int> remote_ranks = {});

  /// How many operations of a channel this rank has started; lives as long as the DeadlockDetector.
  using StartCounter = std::atomic<std::uint64_t>;
  StartCounter& start_counter(const std::string& channel);
  /// This rank has started operation `seq` of the channel of `count`, on this thread.
  void started(StartCounter& count, std::uint64_t seq) {
    count.store(seq, std::memory_order_release);
    if (last_starting_thread_.load(std::memory_order_relaxed) != acting_thread()) add_starting_thread();
  }

  /// While it lives, this thread works for `thread`, which waits for it: what it starts counts as that one's. So do
  /// autograd's threads for the one that called backward().
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

  /// While it lives, this thread starts operations only on channels where no other kind of thread does: that it waits
  /// blocks nobody else, and that it may start more unblocks nobody.
  class BackgroundThread {
   public:
    BackgroundThread() { is_background_thread_ = true; }
    ~BackgroundThread() { is_background_thread_ = false; }
    BackgroundThread(const BackgroundThread&) = delete;
    BackgroundThread& operator=(const BackgroundThread&) = delete;
  };

  /// While it lives, this thread waits, however long it takes, for `pending`, which is in the queue of `lane`.
  class ExecutorWait {
   public:
    ExecutorWait(DeadlockDetector& deadlock_detector, const SerialExecutor* executor, PendingPtr pending);
    ~ExecutorWait();
    ExecutorWait(const ExecutorWait&) = delete;
    ExecutorWait& operator=(const ExecutorWait&) = delete;

   private:
    DeadlockDetector& deadlock_detector_;
  };

  /// Remembers what was seen between the looks of one wait.
  struct Looks {
    std::map<int, std::string> peer_beats;
    base::Deadline::Clock::time_point
        last_progress{};  // when those whom it depends on were last seen to get on; at first: when it began
    base::Deadline::Clock::time_point last_poll{};
    std::string progress;                                     // theirs then
    std::map<int, base::Deadline::Clock::time_point> closed;  // when ranks were first seen to have ended
    bool published = false;
    bool blocked = false;  // the record says that this wait blocks the process
    bool soon = false;     // another seems to wait for this rank as this rank does for it: one more look tells
  };
  /// Called now and then by a wait that lasts. Throws DesyncError, CommError (kUnevenInput), TimeoutError, or the job's
  /// first cause when there is one; returns when the wait may go on.
  void poll(const WaitInfo& waiting, Looks& poll_state);
  /// Whether the agent says that the job has failed: then a look tells why. Costs nothing.
  static bool job_has_failed();
  /// The wait has ended.
  void end(Looks& poll_state) noexcept;

  /// The wait has come to its deadline or limit: a TimeoutError that names who has not come. Of a wait that was too
  /// short for a look it waits up to 300 ms more, to hear from those who came.
  [[noreturn]] void throw_timeout(const WaitInfo& waiting, Looks& poll_state);

  /// The wire failed with `text`: finds out why (a peer that died, left, or a first cause) and throws that; when nobody
  /// knows, what the wire said, with its `hint`.
  [[noreturn]] void throw_transport_failure(const WaitInfo& waiting, const std::string& text,
                                            const std::string& hint = {});

  /// Publishes `error` as the job's first cause unless there is one.
  void publish_failure(const base::CommError& error) noexcept;

  /// This rank cannot go on because of `text`: the job's first cause, unless there is one.
  void publish_failure(base::Cause cause, const std::string& text, const std::string& hint) noexcept;

  /// This rank will not end what it started on `channel`; `text` says why, `peer` who is at fault (-1: unknown).
  void abandon(const std::string& channel, int peer, const std::string& text) noexcept;

  /// This rank closes its world in good order. Not called when an error unwinds the stack: then how the process ends
  /// tells more.
  void leave() noexcept;

  int rank() const { return rank_; }

 private:
  struct PeerRecord;
  static std::thread::id acting_thread() { return acting_for_ ? *acting_for_ : std::this_thread::get_id(); }
  inline static constinit thread_local const std::thread::id* acting_for_ = nullptr;
  inline static constinit thread_local bool is_background_thread_ = false;
  void add_starting_thread();
  base::Deadline patience(const WaitInfo& waiting) const;
  std::optional<PeerRecord> read_peer_record(const std::string& key, const WaitInfo& waiting);
  bool is_blocked_locked() const;
  std::string record();
  void publish_record(const WaitInfo& waiting, Looks& poll_state);
  void throw_first_cause(const WaitInfo& waiting);
  void throw_if_abandoned(const WaitInfo& waiting);
  void check_peer(const WaitInfo& waiting, int peer, Looks& poll_state);
  void check_left(const WaitInfo& waiting, int peer);
  void poll_store(const WaitInfo& waiting, Looks& poll_state);
  [[noreturn]] void throw_store_unreachable(const WaitInfo& waiting, const base::CommError& error);
  void check_exited(const WaitInfo& waiting, int peer, bool accept_clean_exit);
  void check_closed(const WaitInfo& waiting, int peer, Looks& poll_state);
  void check_progress(const WaitInfo& waiting, Looks& poll_state);
  std::string read_awaited_progress(const WaitInfo& waiting);
  std::vector<int> find_absent_ranks(const WaitInfo& waiting);

  std::shared_ptr<job::Store> store_;
  const int rank_;
  const std::string host_;
  const std::chrono::milliseconds progress_limit_;
  const std::vector<int> remote_ranks_;
  std::atomic<std::thread::id> last_starting_thread_{};
  std::mutex mutex_;  // guards what follows
  std::map<std::string, StartCounter> start_counters_;
  std::set<std::thread::id> starting_threads_;           // the threads that called started()
  const SerialExecutor* executor_waited_for_ = nullptr;  // by a ExecutorWait
  PendingPtr pending_waited_for_;
  std::string blocking_wait_;  // the wait that blocks the process, as it stands in the record
  std::uint64_t beat_ = 0;
};

}  // namespace lockstep::comm
