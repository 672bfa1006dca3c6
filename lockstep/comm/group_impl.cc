#include "lockstep/comm/group_impl.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/comm_time.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/job/fatal.h"

namespace lockstep::comm {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;
using base::UsageError;

template <typename T>
bool has(const std::vector<T>& list, T value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

template <typename T>
std::string join_names(const std::vector<T>& list) {
  return base::joined(list, ", ", [](T item) { return name(item); });
}

/// Throws UsageError if another thread is inside a call of the group, until the result is destroyed. Found only when
/// both are inside at once.
auto begin_call(std::atomic<bool>& is_called, const std::string& group) {
  if (is_called.exchange(true, std::memory_order_acquire))
    throw UsageError("two threads use the group " + group + " at the same time; expected one thread at a time",
                     "make a group for each thread with split(), on all ranks, before the threads start");
  return c10::make_scope_exit([&is_called] { is_called.store(false, std::memory_order_release); });
}

}  // namespace

Group::Impl::Impl(std::shared_ptr<World> the_world, std::string the_name, std::vector<int> the_members, int the_rank,
                  SplitParent split_parent)
    : world(std::move(the_world)),
      name(std::move(the_name)),
      members(std::move(the_members)),
      rank(the_rank),
      transport_(world->make_transport(name, members, split_parent)),
      channel_(name, members, rank, transport_, world->deadlock_detector),
      my_signature_(at::empty({channel::kSignatureBytes}, at::kByte)),
      all_signatures_(at::empty({static_cast<std::int64_t>(members.size()) * channel::kSignatureBytes}, at::kByte)) {}

Group::Impl::~Impl() {
  const bool is_idle = executor_.is_idle() && (!any_source_ || any_source_->executor.is_idle()) &&
                       std::all_of(peer_channels_.begin(), peer_channels_.end(),
                                   [](const auto& peer_channel) { return peer_channel.second->executor.is_idle(); });
  if (is_idle) return;
  // Operations that no caller waits for would keep the executors' threads busy until their deadlines.
  transport_->abort(std::make_exception_ptr(
      base::PeerLostError(Cause::kPeerUnreachable, name, world->identity.rank, world->identity.rank,
                          "rank " + std::to_string(world->identity.rank) + " destroyed group " + name +
                              " while an operation was running")));
}

Collective Group::Impl::make_collective(CollectiveKind kind, const at::Tensor& tensor, const CallOptions& options,
                                        int root, ReduceOp reduce_op) const {
  Collective op;  // not an initializer list, for which GCC clears all of it by a slow instruction first
  op.kind = kind;
  op.name = options.name;
  op.op = reduce_op;
  op.root = root;
  op.deadline = options.deadline.value_or(Deadline::never());  // bounded: by the DeadlockDetector
  op.hint = options.hint;
  if (std::any_of(op.name.begin(), op.name.end(),
                  [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; }))
    throw UsageError(std::string(comm::name(kind)) + ": the name " + base::quoted(op.name, 80) +
                     " has control characters; expected one line of text");
  const Capabilities& can = transport_->capabilities();
  const auto call = [&] { return std::string(comm::name(kind)) + "(" + describe(tensor) + ")"; };
  if (!has(can.kinds, kind))
    throw UsageError(call() + ": the transport " + std::string(transport_->name()) + " does not support " +
                     std::string(comm::name(kind)) + "; expected " + join_names(can.kinds));
  if (!tensor.defined()) {
    if (kind == CollectiveKind::kBarrier) return op;
    throw UsageError(std::string(comm::name(kind)) + ": the tensor is undefined");
  }
  if (tensor.dim() > channel::CallSignature::kMaxDims)
    throw UsageError(call() + ": the tensor has " + std::to_string(tensor.dim()) + " dimensions; expected at most " +
                     std::to_string(channel::CallSignature::kMaxDims));
  if (tensor.is_sparse()) throw UsageError(call() + ": sparse tensors are not supported; pass indices and values");
  if (!has(can.dtypes, tensor.scalar_type()))
    throw UsageError(std::string(comm::name(kind)) + ": the transport " + std::string(transport_->name()) +
                     " does not support dtype " + c10::toString(tensor.scalar_type()) + "; expected " +
                     join_names(can.dtypes));
  if (!has(can.devices, tensor.device().type()))
    throw UsageError(call() + ": the tensor is on " + tensor.device().str() + ", which the transport " +
                         std::string(transport_->name()) + " does not support",
                     tensor.is_cuda() ? "this rank uses no GPU: " + world->gpu_unavailable_reason : "");
  if (tensor.is_cuda() && members.size() > 1 && tensor.device() != world->device)
    throw UsageError(call() + ": the tensor is on " + tensor.device().str() + ", but this rank's GPU is " +
                         world->device.str() + " (Group::device())",
                     "create tensors on that GPU, or select another one with LOCKSTEP_DEVICE=cuda:N");
  check_root(kind, root);
  if (reduce_op == ReduceOp::kMean && !at::isFloatingType(tensor.scalar_type()))
    throw UsageError(std::string(comm::name(kind)) + ": the mean of " + describe(tensor) +
                     "; expected a floating-point dtype. Use ReduceOp::kSum, or convert the tensor");
  return op;
}

void Group::Impl::check_root(CollectiveKind kind, int root) const {
  if (root < 0 || root >= static_cast<int>(members.size()))
    throw UsageError(std::string(comm::name(kind)) + ": rank " + std::to_string(root) + " is not in " + name +
                     "; expected 0 to " + std::to_string(members.size() - 1));
}

void check_wire_dtype(const Transport& transport, const std::string& call, at::ScalarType wire_dtype) {
  const auto& wire_dtypes = transport.capabilities().wire_dtypes;
  if (has(wire_dtypes, wire_dtype)) return;
  throw UsageError(
      call + ": the transport " + std::string(transport.name()) + " does not send float32 as " +
          c10::toString(wire_dtype) + "; expected " + join_names(wire_dtypes),
      "use the transport hierarchy, which sends float32 as float32, bfloat16, float16 or int8 between hosts");
}

void Group::Impl::check_wire_dtype(const at::Tensor& tensor, ReduceOp op, at::ScalarType wire_dtype) const {
  if (wire_dtype == at::kFloat) return;
  const std::string call = "all_reduce(" + describe(tensor) + ")";
  if (tensor.scalar_type() != at::kFloat)
    throw UsageError(call + ": wire_dtype is " + c10::toString(wire_dtype) +
                     ", which requires a float32 tensor; expected Float");
  if (wire_dtype == at::kChar && op != ReduceOp::kSum && op != ReduceOp::kMean)
    throw UsageError(call + ": wire_dtype is int8 with the operation " + std::string(comm::name(op)) +
                     "; expected sum or mean");
  comm::check_wire_dtype(*transport_, call, wire_dtype);
}

void Group::Impl::fail(const CommError& error) { channel_.throw_failure(error); }

void Group::Impl::begin(CollectiveRequest& request) {
  channel_.begin(request.op, request.op.input.defined() ? request.op.input : request.op.output);
}

void Group::Impl::run(CollectiveRequest request) {
  const auto scope = begin_call(is_called, name);
  begin(request);
  if (executor_.is_idle()) return execute(request);
  post(std::move(request)).wait();  // bounded: the operation ends at its deadline, or by the DeadlockDetector
}

Work Group::Impl::run_async(CollectiveRequest request) {
  const auto scope = begin_call(is_called, name);
  begin(request);
  return post(std::move(request));
}

Work Group::Impl::watch(WatchedCall call, PendingPtr done) {
  CollectiveRequest request({.kind = call.kind, .name = std::move(call.name), .op = call.op, .root = call.root});
  request.moves_data = false;
  if (call.tensor.defined()) request.shape = channel::SignatureShape(call.tensor, call.may_shapes_differ);
  const auto scope = begin_call(is_called, name);
  if (call.is_compared)
    channel_.begin(request.op, call.tensor);
  else
    channel_.throw_if_closed();
  std::string text = label(request.op);
  auto run = [this, request = std::move(request), is_compared = call.is_compared, done = std::move(done),
              on_error = std::move(call.on_error)] {
    const channel::DeadlockDetector::DeviceThread thread;
    try {
      channel_.throw_if_closed();
      const channel::CallSignature mine = channel::make_signature(request.op, request.shape);
      if (is_compared && members.size() > 1 && (request.shape.may_shapes_differ || !execute_checked(request, mine)))
        gather_signatures(request, mine);
      channel_.wait(*done, request.op, describe(mine));
      if (is_compared) channel_.end(request.op.flight_id);
    } catch (...) {
      if (on_error) on_error();
      throw;
    }
  };
  return {executor_.post(std::move(run)), std::move(text), rank, world->deadlock_detector, &executor_};
}

std::optional<c10::Stream> current_stream(const Collective& op) {
  const at::Tensor& tensor = op.input.defined() ? op.input : op.output;
  if (!tensor.defined() || tensor.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

Work Group::Impl::post(CollectiveRequest request) {
  std::string text = label(request.op);
  request.stream = current_stream(request.op);
  if (request.stream && !request.prepare) {
    request.op.ready_event = std::make_shared<c10::Event>(request.stream->device_type());
    request.op.ready_event->record(*request.stream);
  }
  return {executor_.post([this, r = std::move(request)]() mutable { execute(r); }), std::move(text), rank,
          world->deadlock_detector, &executor_};
}

void Group::Impl::execute(CollectiveRequest& request) {
  channel_.throw_if_closed();
  const c10::OptionalStreamGuard stream(request.stream);
  const channel::CallSignature mine = channel::make_signature(request.op, request.shape);
  if (members.size() == 1 || request.prepare || request.shape.may_shapes_differ || !execute_checked(request, mine)) {
    const at::NoGradGuard no_grad;
    std::vector<channel::CallSignature> calls{mine};
    if (members.size() > 1) calls = gather_signatures(request, mine);
    if (request.prepare) request.prepare(request.op, calls);
    if (request.moves_data) channel_.run(request.op, describe(mine));
  }
  const std::int64_t ticks = channel_.end(request.op.flight_id);
  if (members.size() > 1) base::telemetry::CommTime::add(ticks);
  if (!request.complete) return;
  const at::NoGradGuard no_grad;
  request.complete();
}

/// Compares and runs the operation in one step. Returns false if the transport does not support that.
bool Group::Impl::execute_checked(const CollectiveRequest& request, const channel::CallSignature& mine) {
  mismatched_signatures_.clear();
  const SignatureView call{.bytes = &mine,
                           .size = sizeof mine,
                           .hash = channel::hash_signature(mine),
                           .all_signatures = &mismatched_signatures_};
  const bool is_comparison = !request.moves_data && request.op.kind != CollectiveKind::kBarrier;
  const PendingPtr pending =
      is_comparison ? channel_.start_checked({.seq = request.op.seq, .deadline = request.op.deadline}, call)
                    : channel_.start_checked(request.op, call);
  if (!pending) return false;
  if (!pending->done() || pending->error()) channel_.wait(*pending, request.op, describe(mine));
  if (mismatched_signatures_.empty()) return true;
  check_signatures(request, mismatched_signatures_.data());
  return true;
}

std::vector<channel::CallSignature> Group::Impl::gather_signatures(const CollectiveRequest& request,
                                                                   const channel::CallSignature& mine) {
  std::memcpy(my_signature_.mutable_data_ptr(), &mine, sizeof mine);
  Collective op{.kind = CollectiveKind::kAllGather,
                .name = request.op.name,
                .input = my_signature_,
                .output = all_signatures_,
                .seq = request.op.seq,
                .deadline = request.op.deadline,
                .hint = request.op.hint};
  const PendingPtr pending = channel_.start(op);
  op.kind = request.op.kind;  // for the label: the rank waits in the user's call
  channel_.wait(*pending, op, describe(mine));
  return check_signatures(request, all_signatures_.const_data_ptr());
}

std::vector<channel::CallSignature> Group::Impl::check_signatures(const CollectiveRequest& request, const void* bytes) {
  std::vector<channel::CallSignature> calls(members.size());
  std::memcpy(calls.data(), bytes, calls.size() * sizeof(channel::CallSignature));
  channel::CallMismatch difference{};
  if (!channel::find_mismatch(calls, request.shape.may_shapes_differ, difference)) return calls;
  const auto text = [&](int r) {
    const channel::CallSignature& call = calls[static_cast<std::size_t>(r)];
    return "rank " + std::to_string(members[static_cast<std::size_t>(r)]) + " called " + describe(call) +
           (call.seq == request.op.seq ? "" : " as operation " + std::to_string(call.seq));
  };
  const auto [first, second] = std::minmax(difference.suspect, difference.other);
  fail(base::DesyncError(Cause::kDesync, label(request.op), members[static_cast<std::size_t>(rank)],
                         members[static_cast<std::size_t>(difference.suspect)], text(first) + ", " + text(second),
                         job::kDesyncHint));
}

}  // namespace lockstep::comm
