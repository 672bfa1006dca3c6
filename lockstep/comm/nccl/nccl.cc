#include "lockstep/comm/nccl/nccl.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/nccl/communicator.h"
#include "lockstep/comm/nccl/library.h"

namespace lockstep::comm::nccl {
namespace {

using base::Deadline;

ncclDataType_t nccl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return ncclDouble;
    case at::kFloat: return ncclFloat;
    case at::kHalf: return ncclHalf;
    case at::kBFloat16: return ncclBfloat16;
    case at::kLong: return ncclInt64;
    case at::kInt: return ncclInt32;
    case at::kChar: return ncclInt8;
    case at::kByte:
    case at::kBool: return ncclUint8;  // bool is sent and reduced as bytes
    default:
      throw base::UsageError("nccl: dtype " + std::string(c10::toString(dtype)) + "; expected one that Group accepts");
  }
}

ncclRedOp_t nccl_op(const Collective& op, at::ScalarType dtype) {
  const bool logical = dtype == at::kBool;
  switch (op.op) {
    case ReduceOp::kSum: return logical ? ncclMax : ncclSum;
    case ReduceOp::kMean: return ncclAvg;
    case ReduceOp::kMin: return ncclMin;
    case ReduceOp::kMax: return ncclMax;
    case ReduceOp::kProduct: return logical ? ncclMin : ncclProd;
  }
  throw base::UsageError("nccl: unknown reduce operator " + std::to_string(static_cast<int>(op.op)));
}

/// The buffers of an operation, and the number of elements of one rank's part.
struct CallArguments {
  explicit CallArguments(const Collective& op)
      : part(op.output.defined() && (op.kind == CollectiveKind::kReduceScatter || op.kind == CollectiveKind::kScatter ||
                                     op.kind == CollectiveKind::kRecv)
                 ? op.output
                 : op.input),
        from(op.input.defined() ? static_cast<const char*>(op.input.const_data_ptr()) : nullptr),
        to(op.output.defined() ? static_cast<char*>(op.output.mutable_data_ptr()) : nullptr) {}

  const at::Tensor& part;
  const char* from;
  char* to;
  const std::size_t count = static_cast<std::size_t>(part.numel());
  const ncclDataType_t type = nccl_type(part.scalar_type());
};

/// Issues gather, scatter and all_to_all as one group of sends and receives.
ncclResult_t issue_point_to_point(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size) {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  const CallArguments arguments(op);
  const bool at_root = op.root == rank;
  const bool all = op.kind == CollectiveKind::kAllToAll;
  const std::size_t count = arguments.count / (all ? static_cast<std::size_t>(size) : 1);
  const std::size_t bytes = count * arguments.part.element_size();
  ncclResult_t result = nccl.GroupStart();
  const auto record_error = [&](ncclResult_t next) {
    if (result == ncclSuccess || result == ncclInProgress) result = next;
  };
  for (int peer = 0; peer < size; ++peer) {
    const auto offset = static_cast<std::size_t>(peer) * bytes;
    if (all || (op.kind == CollectiveKind::kScatter && at_root))
      record_error(nccl.Send(arguments.from + offset, count, arguments.type, peer, comm, stream));
    if (all || (op.kind == CollectiveKind::kGather && at_root))
      record_error(nccl.Recv(arguments.to + offset, count, arguments.type, peer, comm, stream));
  }
  if (op.kind == CollectiveKind::kGather)
    record_error(nccl.Send(arguments.from, count, arguments.type, op.root, comm, stream));
  if (op.kind == CollectiveKind::kScatter)
    record_error(nccl.Recv(arguments.to, count, arguments.type, op.root, comm, stream));
  record_error(nccl.GroupEnd());
  return result;
}

/// Describes the call for error messages, for example "ncclBroadcast(float32[1000], root 0)".
std::string describe_call(const Collective& op) {
  const std::string what = describe(op.input.defined() ? op.input : op.output);
  const std::string reduce = ", " + std::string(name(op.op)), root = ", root " + std::to_string(op.root);
  switch (op.kind) {
    case CollectiveKind::kAllReduce: return "ncclAllReduce(" + what + reduce + ")";
    case CollectiveKind::kReduce: return "ncclReduce(" + what + reduce + root + ")";
    case CollectiveKind::kBroadcast: return "ncclBroadcast(" + what + root + ")";
    case CollectiveKind::kAllGather: return "ncclAllGather(" + what + ")";
    case CollectiveKind::kReduceScatter: return "ncclReduceScatter(" + what + reduce + ")";
    case CollectiveKind::kSend: return "ncclSend(" + what + ")";
    case CollectiveKind::kRecv: return "ncclRecv(" + what + ")";
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll: return "ncclSend and ncclRecv (" + std::string(name(op.kind)) + ", " + what + ")";
    case CollectiveKind::kBarrier: break;
  }
  throw base::UsageError("nccl: unsupported operation " + std::to_string(static_cast<int>(op.kind)));
}

/// Enqueues `op` on `stream`, as rank `rank` of `size`. Returns the first result that is an error, otherwise
/// ncclSuccess or ncclInProgress.
ncclResult_t enqueue(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size) {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  const CallArguments n(op);
  const ncclRedOp_t reduce = nccl_op(op, n.part.scalar_type());
  switch (op.kind) {
    case CollectiveKind::kAllReduce: return nccl.AllReduce(n.from, n.to, n.count, n.type, reduce, comm, stream);
    case CollectiveKind::kReduce: return nccl.Reduce(n.from, n.to, n.count, n.type, reduce, op.root, comm, stream);
    case CollectiveKind::kBroadcast: return nccl.Broadcast(n.from, n.to, n.count, n.type, op.root, comm, stream);
    case CollectiveKind::kAllGather: return nccl.AllGather(n.from, n.to, n.count, n.type, comm, stream);
    case CollectiveKind::kReduceScatter: return nccl.ReduceScatter(n.from, n.to, n.count, n.type, reduce, comm, stream);
    case CollectiveKind::kSend: return nccl.Send(n.from, n.count, n.type, op.root, comm, stream);
    case CollectiveKind::kRecv: return nccl.Recv(n.to, n.count, n.type, op.root, comm, stream);
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll: return issue_point_to_point(op, comm, stream, rank, size);
    case CollectiveKind::kBarrier: break;  // without tensors: DeviceTransport passes it to the host's transport
  }
  throw base::UsageError("nccl: unsupported operation " + std::to_string(static_cast<int>(op.kind)));
}

constexpr auto kMaxPollInterval = std::chrono::milliseconds(1);
constexpr auto kSplitTimeout = std::chrono::seconds(10);

class NcclTransport;

/// A Pending whose wait_until() polls done().
class PolledPending : public Pending {
 public:
  bool wait_until(Deadline deadline) override {
    return base::poll_until(deadline, kMaxPollInterval, [&] { return done(); });
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
  std::shared_ptr<GpuCompletion> completion_;
};

/// A communicator of some of another's ranks. The parent makes it, and the child, a transport of its own, takes it
/// over.
struct Split {
  const int color, key;
  ncclComm_t comm = nullptr;  // NCCL may write to it until the split is ready
  bool ready = false;
  bool abandoned = false;  // the child was destroyed first
};

/// A call that a communicator has to make: an operation or a split. NCCL requires that all ranks make the calls of a
/// communicator in the same order, and each one only after the previous call has returned success.
struct QueuedCall {
  std::shared_ptr<NcclPending> operation;
  std::shared_ptr<Split> split;  // if there is no operation
  bool issued = false;
};

class NcclTransport final : public Transport, public std::enable_shared_from_this<NcclTransport> {
 public:
  explicit NcclTransport(NcclOptions options) : options_(std::move(options)), communicator_(options_) {
    if (!options_.parent) return;
    auto* parent = dynamic_cast<NcclTransport*>(options_.parent.get());
    split_ = parent ? parent->split(options_.color, options_.rank) : nullptr;
  }

  ~NcclTransport() override {
    const std::lock_guard lock(mutex_);
    const c10::DeviceGuard device(own_device());
    if (split_) parent().release(*split_);
    finish_splits();
    if (aborted_ || !queue_.empty() || std::uncaught_exceptions() > 0) fail(closed_error("nccl", -1));
    communicator_.close();
  }

  std::string_view name() const override { return "nccl"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all{.devices = {at::kCUDA}};
    return all;
  }

  PendingPtr start(const Collective& op) override {
    auto operation = std::make_shared<NcclPending>(weak_from_this(), op);
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      operation->finish(aborted_);
      return operation;
    }
    started_ = true;
    queue_.push_back({.operation = operation});
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

  /// Returns a split that a later call of is_split_ready() finds ready. Returns null if no rank has started an
  /// operation, and so none has a communicator: the child then meets its ranks at the store.
  std::shared_ptr<Split> split(int color, int key) {
    const std::lock_guard lock(mutex_);
    if (aborted_) std::rethrow_exception(aborted_);
    if (!started_) return nullptr;
    const auto split = std::make_shared<Split>(Split{.color = color, .key = key});
    queue_.push_back({.split = split});
    advance();
    if (aborted_) std::rethrow_exception(aborted_);
    return split;
  }

  bool is_split_ready(const Split& split) {
    const std::lock_guard lock(mutex_);
    if (!aborted_) advance();
    if (aborted_) std::rethrow_exception(aborted_);
    return split.ready;
  }

  /// Ends a split that its child has not taken over.
  void release(Split& split) noexcept {
    const std::lock_guard lock(mutex_);
    split.abandoned = true;
    if (split.ready) NcclCommunicator::abort(split.comm);
  }

 private:
  at::Device own_device() const { return {at::kCUDA, static_cast<c10::DeviceIndex>(options_.gpu.index)}; }

  /// Ends all operations with `cause`.
  void fail(const std::exception_ptr& cause) noexcept {
    if (aborted_) return;
    aborted_ = cause;
    for (QueuedCall& call : queue_) {
      if (call.operation) call.operation->finish(cause);
      if (call.split && call.issued) new std::shared_ptr<Split>(call.split);  // never freed: NCCL may write to it
    }
    queue_.clear();
    communicator_.abort();
  }

  NcclTransport& parent() const { return static_cast<NcclTransport&>(*options_.parent); }

  /// Waits for splits that no child has waited for: a communicator cannot be closed during one.
  void finish_splits() noexcept {
    const auto is_split = [](const QueuedCall& call) { return call.split != nullptr; };
    if (!std::all_of(queue_.begin(), queue_.end(), is_split) || std::uncaught_exceptions() > 0) return;
    for (const Deadline deadline = Deadline::in(kSplitTimeout); !queue_.empty() && !deadline.expired();) {
      if (base::telemetry::RankPage::this_process().stop_requested.load() != 0) return;
      advance();
      if (!queue_.empty()) std::this_thread::sleep_for(kMaxPollInterval);
    }
  }

  bool connect(const std::string& op) {
    if (split_) {
      if (!parent().is_split_ready(*split_)) return false;
      communicator_.set_split_comm(split_->comm);
      split_ = nullptr;
    }
    return communicator_.connect(op);
  }

  void advance() {
    if (queue_.empty()) return;
    try {
      const c10::DeviceGuard device(own_device());
      while (!queue_.empty()) {
        QueuedCall& first = queue_.front();
        const std::string what = first.operation ? label(first.operation->op_) : "split";
        const std::string call = first.operation ? describe_call(first.operation->op_) : "ncclCommSplit";
        if (!connect(what) || !communicator_.is_ready(what, call))
          return;  // this call or an earlier one is in progress
        if (!std::exchange(first.issued, true)) {
          issue(first, what, call);
          continue;
        }
        finish(first);
        queue_.pop_front();
      }
    } catch (...) {
      fail(std::current_exception());
    }
  }

  void issue(const QueuedCall& queued, const std::string& what, const std::string& call) {
    if (queued.split) return communicator_.split(queued.split->color, queued.split->key, &queued.split->comm);
    const Collective& op = queued.operation->op_;
    op.ready_event->block(communicator_.stream());
    const auto stream = static_cast<cudaStream_t>(communicator_.stream().native_handle());
    communicator_.check(
        enqueue(op, communicator_.get(), stream, options_.rank, static_cast<int>(options_.members.size())), what, call);
  }

  void finish(const QueuedCall& queued) {
    if (queued.split) {
      queued.split->ready = true;
      if (queued.split->abandoned) NcclCommunicator::abort(queued.split->comm);
      return;
    }
    NcclPending& operation = *queued.operation;
    operation.completion_ = std::make_shared<GpuCompletion>(weak_from_this(), operation.op_, communicator_.stream());
    operation.finish();
  }

  const NcclOptions options_;
  std::mutex mutex_;  // guards the members below
  NcclCommunicator communicator_;
  std::shared_ptr<Split> split_;  // of the parent, until this communicator has taken it over
  bool started_ = false;          // an operation, at some time
  std::deque<QueuedCall> queue_;
  std::exception_ptr aborted_;
};

bool NcclPending::done() {
  if (is_finished()) return true;
  const auto transport = transport_.lock();
  if (!transport)
    finish(closed_error("nccl", -1));
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
    else if (const auto failed = transport ? transport->check_failure(op_) : closed_error("nccl", -1))
      finish(failed);
  } catch (const std::exception& error) {
    finish(transport ? transport->cuda_failure(op_, error.what()) : closed_error("nccl", -1));
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
