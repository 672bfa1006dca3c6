// Channel: an ordered stream of operations of a fixed set of ranks. It wraps a transport and adds what all operations
// have in common: numbering, bounded waits and error reports.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/process_owned.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm::channel {

/// Numbers operations, bounds their waits and turns failures into errors that name the cause.
///
/// Errors: after a failure the channel is closed, and every later operation throws the same error.
///
/// Threads: one thread calls begin(); at most one other thread waits.
///
/// GPUs: for an operation on GPU tensors, wait() blocks until the operation is enqueued and makes the current stream
/// wait for it. A thread of the channel then waits for its completion with the same time limits; an error closes the
/// channel. On the thread of a SerialExecutor, whose owner waits on the host, wait() blocks until the GPU has finished.
class Channel {
 public:
  Channel(std::string name, std::vector<int> members, int rank, std::shared_ptr<Transport> transport,
          std::shared_ptr<DeadlockDetector> deadlock_detector);
  /// Calls close(), unless an error unwinds the stack. If close() throws, ends the process like an uncaught exception,
  /// because the program would use wrong results.
  ~Channel();
  /// Blocks until the GPU has finished all operations. Throws the error of one of them if this process has not thrown
  /// any failure (the operation was the program's last call).
  void close();

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }
  Transport& transport() { return *transport_; }

  /// Numbers the next operation, publishes it as started, and records it in the flight recorder. `tensor` is the tensor
  /// that the record describes, or undefined. Throws if the channel is closed.
  void begin(Collective& op, const at::Tensor& tensor);
  /// The same for an operation that consists of several Collectives. Puts the number of the operation on this channel
  /// into `what` and returns its number in the flight recorder.
  std::uint64_t begin(base::telemetry::OperationStart& what);
  /// Records that operation `flight_id`, a number from begin(), has ended without an error. An operation that ends with
  /// an error is recorded as abandoned. Returns how many ticks it took; 0 once the channel has
  /// run an operation on a GPU.
  std::int64_t end(std::uint64_t flight_id) {
    if (!gpu_waiter_) return page_.flight.end(flight_id);
    end_after_gpu(flight_id);
    return 0;
  }

  /// Passes `op` to the transport. Throws if the channel is closed.
  PendingPtr start(const Collective& op);

  /// The same for an operation whose signatures the ranks have not compared. Returns null if the transport does not
  /// support this; see Transport::start_checked().
  PendingPtr start_checked(const Collective& op, const SignatureView& call);

  /// Blocks until `pending`, which belongs to operation `op`, is done. `text` describes this rank's call in the error
  /// messages of other ranks. Throws the error of the operation.
  void wait(Pending& pending, const Collective& op, const std::string& text);
  /// Starts `op` and waits for it.
  void run(const Collective& op, const std::string& text);
  /// Blocks until the GPU has finished all operations that wait() was called for. Throws the error of any of them.
  void synchronize();

  /// For a catch block: closes the channel with the exception that is being handled, publishes it, and rethrows it.
  /// `error` is that exception.
  [[noreturn]] void fail(const base::CommError& error);
  /// The same for an error that is not thrown yet.
  [[noreturn]] void throw_failure(const base::CommError& error);
  /// Gives up an operation that this rank has started, because of `why`. Closes the channel on this rank and on the
  /// other ranks.
  void abandon(const std::string& why) noexcept;
  /// Throws the error that closed the channel. Throws UsageError in a child made by fork(), which has no part in the
  /// job and would write to the memory that the rank shares with others.
  void throw_if_closed() const;

 private:
  bool close_with(const std::exception_ptr& error);
  void wait_for_gpu();
  void wait_on_host(Pending& pending, const Collective& op, const std::string& text);
  void end_after_gpu(std::uint64_t flight_id);
  [[noreturn]] void throw_transport_failure(const std::exception_ptr& error, const WaitInfo& wait_info);

  const std::string name_;
  const std::vector<int> members_;  // world ranks
  const int rank_;                  // in the channel, not in the world
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<DeadlockDetector> deadlock_detector_;
  DeadlockDetector::StartCounter& start_counter_;
  base::telemetry::RankPage& page_ = base::telemetry::RankPage::this_process();
  const std::uint16_t flight_channel_;
  std::uint64_t seq_ = 0;
  const base::ForkGuard fork_guard_;
  std::atomic<bool> is_closed_{false};
  mutable std::mutex mutex_;  // guards closing_error_
  std::exception_ptr closing_error_;
  // Waits for operations on a GPU; made for the first one. Last member, so that its thread ends before the members that
  // it uses.
  std::unique_ptr<SerialExecutor> gpu_waiter_;
};

}  // namespace lockstep::comm::channel
