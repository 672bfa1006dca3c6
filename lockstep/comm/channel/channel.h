// One ordered stream of operations of a fixed set of ranks: a transport, and everything that all operations have in
// common.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm {

/// Numbers operations, bounds their waits, and turns what goes wrong into errors that say why. After a failure it is
/// closed: every later operation throws the same error. next() comes from one thread, waits from one other at most.
///
/// Of an operation on a GPU's tensors wait() waits until it is on its way, and puts what comes next on the current
/// stream behind it; a thread of the channel then sees to its end as others do to theirs: within its bounds, with
/// errors that close the channel. On the thread of a SerialExecutor, whose owner waits for the host, wait() waits for
/// the GPU.
class Channel {
 public:
  Channel(std::string name, std::vector<int> members, int rank, std::shared_ptr<Transport> transport,
          std::shared_ptr<DeadlockDetector> deadlock_detector);
  /// Operations on a GPU come to their ends, unless an error unwinds the stack. When one of them has failed and nobody
  /// has been told of any failure, as after the last call of a program, that ends the process as an exception that
  /// nobody catches does: its results are not those that it takes them for.
  ~Channel();

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }
  Transport& transport() { return *transport_; }

  /// Numbers the next operation, which is announced as started and recorded; `tensor` is what it is about, or
  /// undefined.
  void begin(Collective& op, const at::Tensor& tensor);
  /// The same of what is more than one Collective. Its number in the flight recorder; that on this channel is put into
  /// `what`.
  std::uint64_t begin(base::OperationStart& what);
  /// What begin() has recorded has ended well; what an error ends is given up.
  void end(std::uint64_t record) { gpu_waiter_ ? end_after_gpu(record) : page_.flight.end(record); }

  /// Gives `op` to the transport. Throws when the channel is closed.
  PendingPtr start(const Collective& op);

  /// The same with what this rank has called, which the ranks have not compared: null where the transport cannot, see
  /// there.
  PendingPtr start_checked(const Collective& op, const SignatureView& call);

  /// Waits for `pending`, which belongs to operation `op`; `text` is what this rank called, for others to read.
  void wait(Pending& pending, const Collective& op, const std::string& text);
  void run(const Collective& op, const std::string& text);
  /// Waits until the GPU has done all that has been waited for. Throws what ended one of them.
  void synchronize();

  /// Closes the channel with the exception in flight, publishes it, and throws it on.
  [[noreturn]] void fail(const base::CommError& error);
  /// This rank leaves an operation that it has started, because of `why`: closes the channel here, and tells the
  /// others.
  void abandon(const std::string& why) noexcept;
  void throw_if_closed() const;

 private:
  bool close(const std::exception_ptr& error);
  void wait_on_host(Pending& pending, const Collective& op, const std::string& text);
  void end_after_gpu(std::uint64_t record);
  [[noreturn]] void throw_transport_failure(const std::exception_ptr& error, const WaitInfo& waiting);

  const std::string name_;
  const std::vector<int> members_;  // world ranks
  const int rank_;                  // here, not in the world
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<DeadlockDetector> deadlock_detector_;
  DeadlockDetector::StartCounter& start_counter_;
  base::RankPage& page_ = base::RankPage::this_process();
  const std::uint16_t flight_channel_;
  std::uint64_t seq_ = 0;
  std::atomic<bool> is_closed_{false};
  mutable std::mutex mutex_;  // guards closing_error_
  std::exception_ptr closing_error_;
  std::unique_ptr<SerialExecutor>
      gpu_waiter_;  // sees to operations on a GPU; made for the first one. Last: its thread ends before what it uses
};

}  // namespace lockstep::comm
