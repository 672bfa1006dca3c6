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

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::milliseconds(1);

class NcclTransport;

/// A Pending that is looked at until it is done.
class Polled : public Pending {
 public:
  bool wait_until(Deadline deadline) override {
    for (auto pause = std::chrono::duration_cast<std::chrono::microseconds>(kFirstPause); !done();
         pause = std::min<std::chrono::microseconds>(pause * 2, kLongestPause)) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }
};

/// The end of an operation on the GPU.
class GpuEnd final : public Polled {
 public:
  GpuEnd(std::weak_ptr<NcclTransport> transport, Collective op, const c10::Stream& stream)
      : transport_(std::move(transport)), op_(std::move(op)), event_(stream.device_type()) {
    event_.record(stream);
  }
  bool done() override;
  void order() override { event_.block(c10::impl::VirtualGuardImpl(event_.device_type()).getStream(event_.device())); }

 private:
  const std::weak_ptr<NcclTransport> transport_;
  const Collective op_;  // keeps the tensors
  c10::Event event_;
};

/// An operation until NCCL has taken it.
class Operation final : public Polled {
 public:
  Operation(std::weak_ptr<NcclTransport> transport, const Collective& op) : transport_(std::move(transport)), op_(op) {
    if (op_.after) return;
    const at::Device device = (op.input.defined() ? op.input : op.output).device();
    op_.after = std::make_shared<c10::Event>(device.type());
    op_.after->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  bool done() override;
  std::shared_ptr<Pending> on_device() override { return end_; }

 private:
  friend class NcclTransport;
  const std::weak_ptr<NcclTransport> transport_;
  Collective op_;
  bool called_ = false;
  std::shared_ptr<GpuEnd> end_;
};

class NcclTransport final : public Transport, public std::enable_shared_from_this<NcclTransport> {
 public:
  explicit NcclTransport(NcclOptions options) : options_(std::move(options)), communicator_(options_) {
    if (!options_.parent) return;
    auto* parent = dynamic_cast<NcclTransport*>(options_.parent.get());
    from_parent_ = parent ? parent->split(options_.color, options_.rank) : nullptr;
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
      Capabilities can = everything_on_cpu();
      can.devices = {at::kCUDA};
      return can;
    }();
    return all;
  }

  PendingPtr start(const Collective& op) override {
    auto operation = std::make_shared<Operation>(weak_from_this(), op);
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

  /// Called by who waits for an operation that NCCL has not taken yet.
  void look() {
    const std::lock_guard lock(mutex_);
    if (!aborted_) advance();
  }

  std::exception_ptr aborted() {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }

  /// What has failed, as far as is known; null: nothing. Called by who waits for the GPU.
  std::exception_ptr failure(const Collective& op) {
    const std::lock_guard lock(mutex_);
    if (aborted_ || !communicator_.connected()) return aborted_;
    try {
      communicator_.settled(label(op), call_of(op));
    } catch (...) {
      fail(std::current_exception());
    }
    return aborted_;
  }

  /// CUDA itself fails: `what` says how.
  std::exception_ptr cuda_failure(const Collective& op, const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (aborted_) return aborted_;
    try {
      communicator_.cuda_failed(label(op), call_of(op) + " was running when a kernel or a copy on the GPU failed (" +
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

  /// Whether what split() has returned is there.
  bool has_split() {
    const std::lock_guard lock(mutex_);
    if (aborted_) std::rethrow_exception(aborted_);
    return communicator_.settled("split", "ncclCommSplit");
  }

 private:
  at::Device own_device() const { return {at::kCUDA, static_cast<c10::DeviceIndex>(options_.gpu.index)}; }

  /// Ends everything with `cause`.
  void fail(const std::exception_ptr& cause) noexcept {
    if (aborted_) return;
    aborted_ = cause;
    for (const auto& operation : queue_) operation->finish(cause);
    queue_.clear();
    communicator_.abort();
  }

  bool connect(const std::string& op) {
    if (from_parent_) {
      if (!static_cast<NcclTransport&>(*options_.parent).has_split()) return false;
      communicator_.adopt(*from_parent_);
      from_parent_ = nullptr;
    }
    return communicator_.connect(op);
  }

  void advance() {
    if (queue_.empty()) return;
    try {
      const c10::DeviceGuard device(own_device());
      if (!connect(label(queue_.front()->op_))) return;
      while (!queue_.empty()) {
        Operation& first = *queue_.front();
        const std::string what = label(first.op_), call = call_of(first.op_);
        if (!communicator_.settled(what, call)) return;  // a split goes on, or this one
        if (!std::exchange(first.called_, true)) {
          first.op_.after->block(communicator_.stream());
          const auto stream = static_cast<cudaStream_t>(communicator_.stream().native_handle());
          communicator_.check(
              issue(first.op_, communicator_.get(), stream, options_.rank, static_cast<int>(options_.members.size())),
              what, call);
          continue;
        }
        first.end_ = std::make_shared<GpuEnd>(weak_from_this(), first.op_, communicator_.stream());
        first.finish();
        queue_.pop_front();
      }
    } catch (...) {
      fail(std::current_exception());
    }
  }

  const NcclOptions options_;
  std::mutex mutex_;  // guards what follows
  Communicator communicator_;
  std::shared_ptr<ncclComm_t> from_parent_;
  std::vector<std::shared_ptr<ncclComm_t>> children_;  // NCCL writes there
  std::deque<std::shared_ptr<Operation>> queue_;
  std::exception_ptr aborted_;
};

std::exception_ptr closed() {
  return std::make_exception_ptr(
      base::PeerLost(base::Cause::kPeerUnreachable, "nccl", -1, -1, "the transport was closed"));
}

bool Operation::done() {
  if (is_finished()) return true;
  const auto transport = transport_.lock();
  if (!transport)
    finish(closed());
  else
    transport->look();
  return is_finished();
}

bool GpuEnd::done() {
  if (is_finished()) return true;
  const auto transport = transport_.lock();
  try {
    const c10::DeviceGuard device(
        event_.device());  // else asking makes a context on this thread's, which takes memory there
    if (const auto error = transport ? transport->aborted() : nullptr)
      finish(error);  // which may have ended it on the GPU, too
    else if (event_.query())
      finish();
    else if (const auto failed = transport ? transport->failure(op_) : closed())
      finish(failed);
  } catch (const std::exception& error) {
    finish(transport ? transport->cuda_failure(op_, error.what()) : closed());
  }
  return is_finished();
}

}  // namespace

std::shared_ptr<Transport> make_nccl_transport(NcclOptions options) {
  return std::make_shared<NcclTransport>(std::move(options));
}

void leave_nccl_split(Transport& parent) {
  if (auto* transport = dynamic_cast<NcclTransport*>(&parent)) transport->split(NCCL_SPLIT_NOCOLOR, 0);
}

}  // namespace lockstep::comm
