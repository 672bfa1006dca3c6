// The part of the backend "lockstep" for tensors on GPUs: another backend of c10d, such as ProcessGroupNCCL, whose
// calls the ranks compare and whose operations they watch.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/group.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/work.h"

namespace lockstep::python {

/// Passes operations on to `inner`, which queues them on the device. Meanwhile a thread compares the call with those of
/// the other ranks, and waits until the device has executed the operation; the caller waits for neither. If the calls
/// differ, a rank dies, or the ranks make no progress, the thread aborts `inner`, and this rank's next call and all its
/// waits throw the error that names the rank. Threads: one at a time; abort() from any.
class DeviceOperations {
 public:
  /// The first error of an operation.
  class Failure {
   public:
    void set(std::exception_ptr error);
    void throw_if_set() const;

   private:
    mutable std::mutex mutex_;
    std::exception_ptr error_;
  };

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Start = std::function<WorkPtr(c10d::Backend& inner)>;

  /// `group` has the same ranks as `inner` and no other user.
  DeviceOperations(comm::Group group, c10::intrusive_ptr<c10d::Backend> inner)
      : group_(std::move(group)), inner_(std::move(inner)) {}

  c10d::Backend& inner() const { return *inner_; }
  c10::intrusive_ptr<c10d::Backend> backend() const { return inner_; }

  /// `start` calls the operation. A null Work that it returns is passed on: the operation belongs to a
  /// coalesced one.
  WorkPtr run(comm::WatchedCall call, const Start& start);
  /// The operation is the member function `operation` of c10d::Backend.
  template <typename... Parameters, typename... Arguments>
  WorkPtr run(comm::WatchedCall call, WorkPtr (c10d::Backend::*operation)(Parameters...), Arguments&... arguments) {
    return run(std::move(call), [&](c10d::Backend& inner) { return (inner.*operation)(arguments...); });
  }

  void start_coalescing();
  /// The operations since start_coalescing() are compared as one.
  WorkPtr end_coalescing();

  /// Aborts inner(), and closes the group on all ranks.
  void abort() noexcept;
  /// Blocks until all operations have been compared and executed, then ends inner(). Throws the error of any.
  void shutdown();

 private:
  WorkPtr watch(comm::WatchedCall call, const Start& start);

  comm::Group group_;
  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
  std::optional<comm::Work> last_;        // its end is that of all before it
  std::optional<std::string> coalesced_;  // the calls since start_coalescing()
};

}  // namespace lockstep::python
