#include "lockstep/comm/nccl/nccl.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/nccl/calls.h"
#include "lockstep/comm/nccl/communicator.h"

namespace lockstep::comm::nccl {
namespace {

using base::Deadline;

constexpr auto kMinPollInterval = std::chrono::microseconds(20);
constexpr auto kMaxPollInterval = std::chrono::milliseconds(1);

class NcclTransport;

/// A Pending whose wait_until() polls done().
class PolledPending : public Pending {
 public:
  bool wait_until(Deadline deadline) override {
    for (auto interval = std::chrono::duration_cast<std::chrono::microseconds>(kMinPollInterval); !done();
         interval = std::min<std::chrono::microseconds>(interval * 2, kMaxPollInterval)) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(interval);
    }
    return true;
  }
};

/// The completion of an operation on the GPU.
class GpuCompletion final : public PolledPending {
 public:
  GpuCompletion(std::weak_ptr<NcclTransport> transport, Collective op, const c10::Stream& stream)
      : transport_(std::move(transport)), op_(std::move(op)), event_(stream.device_type()) {
    event_.record(stream);
  }
  bool done() override;
  void block_current_stream() override {
    event_.block(c10::impl::VirtualGuardImpl(event_.device_type()).getStream(event_.device()));
  }

 private:
  const std::weak_ptr<NcclTransport> transport_;
  const Collective op_;  // keeps the tensors alive
  c10::Event event_;
};

/// An operation that is done when NCCL has enqueued it.
class NcclPending final : public PolledPending {
 public:
  NcclPending(std::weak_ptr<NcclTransport> transport, const Collective& op)
      : transport_(std::move(transport)), op_(op) {
    if (op_.ready_event) return;
    const at::Device device = (op.input.defined() ? op.input : op.output).device();
    op_.ready_event = std::make_shared<c10::Event>(device.type());
    op_.ready_event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  bool done() override;
  std::shared_ptr<Pending> device_completion() override { return completion_; }

 private:
  friend class NcclTransport;
  const std::weak_ptr<NcclTransport> transport_;
  Collective op_;
  bool enqueued_ = false;
  std::shared_ptr<GpuCompletion> completion_;
};

class NcclTransport final : public Transport, public std::enable_shared_from_this<NcclTransport> {
 public:
  explicit NcclTransport(NcclOptions options) : options_(std::move(options)), communicator_(options_) {
    if (!options_.parent) return;
    auto* parent = dynamic_cast<NcclTransport*>(options_.parent.get());
    split_comm_ = parent ? parent->split(options_.color, options_.rank) : nullptr;
  }

  ~NcclTransport() override {
    const std::lock_guard lock(mutex_);
    const c10::DeviceGuard device(own_device());
    if (aborted_ || !queue_.empty() || std::uncaught_exceptions() > 0) communicator_.abort();
    communicator_.close();
  }

  std::string_view name() const override { return "nccl"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = [] {
      Capabilities can = full_cpu_capabilities();
      can.devices = {at::kCUDA};
      return can;
    }();
    return all;
  }

  PendingPtr start(const Collective& op) override {
    auto operation = std::make_shared<NcclPending>(weak_from_this(), op);
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      operation->finish(aborted_);
      return operation;
    }
    queue_.push_back(operation);
    advance();
    return operation;
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(mutex_);
    fail(cause);
  }

  /// Called while a thread waits for an operation that NCCL has not enqueued.
  void make_progress() {
    const std::lock_guard lock(mutex_);
    if (!aborted_) advance();
  }

  std::exception_ptr aborted() {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }

  /// Returns the error of the communicator, or null. Called while a thread waits for the GPU.
  std::exception_ptr check_failure(const Collective& op) {
    const std::lock_guard lock(mutex_);
    if (aborted_ || !communicator_.connected()) return aborted_;
    try {
      communicator_.is_ready(label(op), describe_call(op));
    } catch (...) {
      fail(std::current_exception());
    }
    return aborted_;
  }

  /// Returns the error of an operation that was running when CUDA failed with the message `what`.
  std::exception_ptr cuda_failure(const Collective& op, const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (aborted_) return aborted_;
    try {
      communicator_.throw_cuda_failure(label(op), describe_call(op) +
                                                      " was running when a kernel or a copy on the GPU failed (" +
                                                      what.substr(0, what.find('\n')) + ")");
    } catch (...) {
      fail(std::current_exception());
    }
    return aborted_;
  }

  std::shared_ptr<ncclComm_t> split(int color, int key) {
    const std::lock_guard lock(mutex_);
    if (aborted_) std::rethrow_exception(aborted_);
    if (!communicator_.connected()) return nullptr;
    const c10::DeviceGuard device(own_device());
    children_.push_back(std::make_shared<ncclComm_t>(nullptr));
    communicator_.split(color, key, children_.back().get());
    return children_.back();
  }

  /// Returns true if the communicator that split() returned is valid.
  bool is_split_ready() {
    const std::lock_guard lock(mutex_);
    if (aborted_) std::rethrow_exception(aborted_);
    return communicator_.is_ready("split", "ncclCommSplit");
  }

 private:
  at::Device own_device() const { return {at::kCUDA, static_cast<c10::DeviceIndex>(options_.gpu.index)}; }

  /// Ends all operations with `cause`.
  void fail(const std::exception_ptr& cause) noexcept {
    if (aborted_) return;
    aborted_ = cause;
    for (const auto& operation : queue_) operation->finish(cause);
    queue_.clear();
    communicator_.abort();
  }

  bool connect(const std::string& op) {
    if (split_comm_) {
      if (!static_cast<NcclTransport&>(*options_.parent).is_split_ready()) return false;
      communicator_.set_split_comm(*split_comm_);
      split_comm_ = nullptr;
    }
    return communicator_.connect(op);
  }

  void advance() {
    if (queue_.empty()) return;
    try {
      const c10::DeviceGuard device(own_device());
      if (!connect(label(queue_.front()->op_))) return;
      while (!queue_.empty()) {
        NcclPending& first = *queue_.front();
        const std::string what = label(first.op_), call = describe_call(first.op_);
        if (!communicator_.is_ready(what, call)) return;  // a split or this operation is in progress
        if (!std::exchange(first.enqueued_, true)) {
          first.op_.ready_event->block(communicator_.stream());
          const auto stream = static_cast<cudaStream_t>(communicator_.stream().native_handle());
          communicator_.check(
              enqueue(first.op_, communicator_.get(), stream, options_.rank, static_cast<int>(options_.members.size())),
              what, call);
          continue;
        }
        first.completion_ = std::make_shared<GpuCompletion>(weak_from_this(), first.op_, communicator_.stream());
        first.finish();
        queue_.pop_front();
      }
    } catch (...) {
      fail(std::current_exception());
    }
  }

  const NcclOptions options_;
  std::mutex mutex_;  // guards the members below
  NcclCommunicator communicator_;
  std::shared_ptr<ncclComm_t> split_comm_;
  std::vector<std::shared_ptr<ncclComm_t>> children_;  // kept as long as NCCL may write to them
  std::deque<std::shared_ptr<NcclPending>> queue_;
  std::exception_ptr aborted_;
};

std::exception_ptr closed_error() {
  return std::make_exception_ptr(
      base::PeerLostError(base::Cause::kPeerUnreachable, "nccl", -1, -1, "the transport was closed"));
}

bool NcclPending::done() {
  if (is_finished()) return true;
  const auto transport = transport_.lock();
  if (!transport)
    finish(closed_error());
  else
    transport->make_progress();
  return is_finished();
}

bool GpuCompletion::done() {
  if (is_finished()) return true;
  const auto transport = transport_.lock();
  try {
    // Without the guard, query() would create a context on this thread's current GPU, which takes memory there.
    const c10::DeviceGuard device(event_.device());
    if (const auto error = transport ? transport->aborted() : nullptr)
      finish(error);  // the abort may have ended the operation on the GPU, so query() could return true
    else if (event_.query())
      finish();
    else if (const auto failed = transport ? transport->check_failure(op_) : closed_error())
      finish(failed);
  } catch (const std::exception& error) {
    finish(transport ? transport->cuda_failure(op_, error.what()) : closed_error());
  }
  return is_finished();
}

}  // namespace

std::shared_ptr<Transport> make_nccl_transport(NcclOptions options) {
  return std::make_shared<NcclTransport>(std::move(options));
}

void skip_nccl_split(Transport& parent) {
  if (auto* transport = dynamic_cast<NcclTransport*>(&parent)) transport->split(NCCL_SPLIT_NOCOLOR, 0);
}

}  // namespace lockstep::comm::nccl
