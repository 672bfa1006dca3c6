#include "python/src/backend.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_access.h"
#include "python/src/backend_work.h"
#include "python/src/monitored_barrier.h"

namespace lockstep::python {
namespace {

using c10d::OpType;
using comm::CallOptions;
using comm::CollectiveKind;
using comm::Group;
using comm::ReduceOp;
using std::chrono::milliseconds;

/// `call` with the reduction `op`; one that Group does not have is compared by its number.
comm::WatchedCall reduction(comm::WatchedCall call, const c10d::ReduceOp& op) {
  if (const auto plain = to_reduce_op(op))
    call.op = *plain;
  else
    call.name += " reduction " + std::to_string(static_cast<c10d::ReduceOp::RedOpType>(op));
  return call;
}

/// An operation on all of `tensors`, which is compared by the first of them and their number.
comm::WatchedCall coalesced(CollectiveKind kind, const Tensors& tensors) {
  return {.kind = kind, .tensor = tensors.at(0), .name = std::to_string(tensors.size()) + " tensors"};
}

}  // namespace

template <typename Given, typename Operation>
WorkPtr LockstepBackend::start(OpType type, const char* title, const Tensors& inputs, Tensors results,
                               const Given& given, Operation operation) {
  check_open();
  ++num_operations_;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type, title, inputs, std::move(results));
  auto run = [operation = std::move(operation), options = call_options(given.timeout)]() mutable {
    operation(options);
  };
  // On the executor's thread: in a callback of a future, which runs between the same two operations on every rank.
  const bool in_callback = comm::channel::SerialExecutor::current() == &*executor_;
  if (in_callback || (!given.asyncOp && executor_->is_idle()))
    work->execute(std::move(run));
  else
    executor_->post([work, run = std::move(run)] { work->execute(run); });
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

template <typename Given, typename Operation>
WorkPtr LockstepBackend::start_into(const at::Tensor& result, OpType type, const char* title, const Tensors& inputs,
                                    const Given& given, Operation operation) {
  return start(type, title, inputs, {result}, given,
               [line = FlatResult(result), operation = std::move(operation)](const CallOptions& options) mutable {
                 operation(line.flat_tensor(), options);
                 line.finish();
               });
}

CallOptions LockstepBackend::call_options(milliseconds timeout) const {
  const milliseconds limit = timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
  return limit.count() > 0 ? CallOptions{.deadline = base::Deadline::in(limit)} : CallOptions{};
}

/// The name of an operation on gradients.
std::string LockstepBackend::step_name() const {
  const std::uint64_t steps = optimizer_steps_;
  if (steps == 0 || !counts_steps_ || torch::autograd::get_current_graph_task_id() < 0) return {};
  return "in backward() after " + std::to_string(steps) + " optimizer steps";
}

WorkPtr LockstepBackend::point_to_point(OpType type, const char* title, const at::Tensor& tensor, comm::Work work,
                                        std::shared_ptr<int> source, std::function<void()> complete) {
  auto started = c10::make_intrusive<PointToPointWork>(rank_, type, title, tensor, std::move(work), std::move(source),
                                                       std::move(complete));
  if (coalesced_) coalesced_->push_back(started);
  return started;
}

void LockstepBackend::check_open() const {
  if (!group_) throw base::UsageError("the process group has been destroyed");
}

CallOptions LockstepBackend::point_to_point_options(int tag) const {
  check_open();
  CallOptions options = call_options(c10d::kUnsetTimeout);
  if (tag != 0) options.name = "tag " + std::to_string(tag);
  return options;
}

bool LockstepBackend::on_device(const at::Tensor& tensor) const {
  check_open();
  if (device_ && tensor.device().type() == device_type_) return true;
  if (tensor.is_cpu()) return false;
  throw base::UsageError(comm::describe(tensor) + " is on " + tensor.device().str() +
                             ", and the backend lockstep of this process has no NCCL for it",
                         "use a torch with CUDA and NCCL, and a GPU that torch.cuda.is_available() finds when the "
                         "process group is made");
}

void LockstepBackend::set_device(c10::DeviceType type, Group group, c10::intrusive_ptr<c10d::Backend> inner) {
  device_type_ = type;
  device_.emplace(std::move(group), std::move(inner));
}

void LockstepBackend::shutdown() {
  if (device_) device_->shutdown();
  device_.reset();
  executor_.reset();
  group_.reset();
}

void LockstepBackend::abort() {
  if (device_) device_->abort();
  if (group_) comm::GroupAccess::abandon(*group_, "the process group was aborted");
}

void LockstepBackend::setTimeout(milliseconds timeout) {
  timeout_ = timeout;
  if (device_) device_->inner().setTimeout(timeout);
}

void LockstepBackend::eagerConnectSingleDevice(at::Device device) {
  if (device_) device_->inner().eagerConnectSingleDevice(device);
}

void LockstepBackend::startCoalescing() {
  if (!device_) return Backend::startCoalescing();
  coalesced_.emplace();
  device_->start_coalescing();
}

WorkPtr LockstepBackend::endCoalescing() {
  if (!device_) return Backend::endCoalescing();
  auto works = *std::exchange(coalesced_, std::nullopt);
  if (auto on_device = device_->end_coalescing()) works.push_back(std::move(on_device));
  return c10::make_intrusive<JoinedWork>(rank_, std::move(works));
}

WorkPtr LockstepBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& given) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  const int root = static_cast<int>(given.rootRank);
  if (on_device(tensor))
    return device_->run({.kind = CollectiveKind::kBroadcast, .tensor = tensor, .root = root}, &Backend::broadcast,
                        tensors, given);
  return start_into(
      tensor, OpType::BROADCAST, "lockstep:broadcast", tensors, given,
      [this, root](const at::Tensor& line, const CallOptions& options) { group_->broadcast(line, root, options); });
}

WorkPtr LockstepBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (on_device(tensor))
    return device_->run(
        reduction({.kind = CollectiveKind::kAllReduce, .tensor = tensor, .name = step_name()}, given.reduceOp),
        &Backend::allreduce, tensors, given);
  if (tensor.is_sparse())
    return start(OpType::ALLREDUCE, "lockstep:all_reduce", tensors, tensors, given,
                 [this, tensor = tensors[0], op = given.reduceOp](const CallOptions& options) mutable {
                   all_reduce_sparse(*group_, tensor, op, options);
                 });
  check_reducible(tensor, given.reduceOp, "all_reduce");
  return start_into(tensor, OpType::ALLREDUCE, "lockstep:all_reduce", tensors, given,
                    [this, op = given.reduceOp, name = step_name()](const at::Tensor& line, CallOptions options) {
                      options.name = name;
                      all_reduce(*group_, line, op, options);
                    });
}

WorkPtr LockstepBackend::allreduce_rounded(const at::Tensor& tensor, at::ScalarType wire_dtype) {
  if (on_device(tensor)) throw base::UsageError("allreduce_rounded: the tensor is on a GPU; expected one on the CPU");
  return start_into(tensor, OpType::ALLREDUCE, "lockstep:all_reduce", {tensor}, c10d::AllreduceOptions(),
                    [this, wire_dtype](const at::Tensor& line, CallOptions options) {
                      options.wire_dtype = wire_dtype;
                      group_->all_reduce(line, ReduceOp::kSum, options);
                    });
}

WorkPtr LockstepBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& given) {
  if (on_device(only(tensors, "all_reduce")))
    return device_->run({.kind = CollectiveKind::kAllReduce, .name = "sparse"}, &Backend::allreduce_sparse, tensors,
                        given);
  return allreduce(tensors, given);
}

WorkPtr LockstepBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) {
  if (on_device(tensors.at(0)))
    return device_->run(reduction(coalesced(CollectiveKind::kAllReduce, tensors), given.reduceOp),
                        &Backend::allreduce_coalesced, tensors, given);
  check_reducible(tensors.at(0), given.reduceOp, "all_reduce");
  return start(OpType::ALLREDUCE_COALESCED, "lockstep:all_reduce", tensors, tensors, given,
               [this, all = Concatenated("all_reduce_coalesced", tensors, false),
                op = given.reduceOp](const CallOptions& options) mutable {
                 all.copy_from_tensors();
                 all_reduce(*group_, all.flat_tensor(), op, options);
                 all.copy_to_tensors();
               });
}

WorkPtr LockstepBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& given) {
  const at::Tensor& tensor = only(tensors, "reduce");
  const int root = static_cast<int>(given.rootRank);
  if (on_device(tensor))
    return device_->run(reduction({.kind = CollectiveKind::kReduce, .tensor = tensor, .root = root}, given.reduceOp),
                        &Backend::reduce, tensors, given);
  check_reducible(tensor, given.reduceOp, "reduce");
  return start_into(tensor, OpType::REDUCE, "lockstep:reduce", tensors, given,
                    [this, root, op = given.reduceOp](const at::Tensor& line, const CallOptions& options) {
                      python::reduce(*group_, line, root, op, options);
                    });
}

WorkPtr LockstepBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& given) {
  const at::Tensor& input = only(inputs, "all_gather");
  if (on_device(input))
    return device_->run({.kind = CollectiveKind::kAllGather, .tensor = input, .may_shapes_differ = true},
                        &Backend::allgather, outputs, inputs, given);
  const Tensors& parts = only(outputs, "all_gather", size_);
  return start(OpType::ALLGATHER, "lockstep:all_gather", inputs, parts, given,
               [this, all = Concatenated("all_gather", parts, true), line = flat(input)](const CallOptions& options) {
                 group_->all_gather(all.flat_tensor(), line, options);
                 all.copy_to_tensors();
               });
}

WorkPtr LockstepBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& given) {
  if (on_device(input))
    return device_->run({.kind = CollectiveKind::kAllGather, .tensor = input}, &Backend::_allgather_base, output, input,
                        given);
  return start_into(output, OpType::_ALLGATHER_BASE, "lockstep:all_gather", {input}, given,
                    [this, from = flat(input)](const at::Tensor& to, const CallOptions& options) {
                      group_->all_gather(to, from, options);
                    });
}

WorkPtr LockstepBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& given) {
  if (on_device(inputs.at(0)))
    return device_->run(coalesced(CollectiveKind::kAllGather, inputs), &Backend::allgather_into_tensor_coalesced,
                        outputs, inputs, given);
  return start(OpType::COALESCED, "lockstep:all_gather", inputs, outputs, given,
               [this, outputs, inputs](const CallOptions& options) {
                 for (std::size_t i = 0; i < outputs.size(); ++i) {
                   const FlatResult to(outputs[i]);
                   group_->all_gather(to.flat_tensor(), flat(inputs[i]), options);
                   to.finish();
                 }
               });
}

WorkPtr LockstepBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& given) {
  if (on_device(inputs.at(0)))
    return device_->run(coalesced(CollectiveKind::kAllGather, inputs), &Backend::allgather_coalesced, outputs, inputs,
                        given);
  // outputs[rank][i] is input i of that rank.
  Tensors results;
  for (const Tensors& of_rank : outputs) results.insert(results.end(), of_rank.begin(), of_rank.end());
  return start(OpType::COALESCED, "lockstep:all_gather", inputs, results, given,
               [this, outputs, inputs](const CallOptions& options) {
                 for (std::size_t i = 0; i < inputs.size(); ++i) {
                   Tensors parts;
                   for (const Tensors& of_rank : outputs) parts.push_back(of_rank.at(i));
                   const Concatenated all("all_gather_coalesced", parts, true);
                   group_->all_gather(all.flat_tensor(), flat(inputs[i]), options);
                   all.copy_to_tensors();
                 }
               });
}

WorkPtr LockstepBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& given) {
  const at::Tensor& input = only(inputs, "gather");
  const int root = static_cast<int>(given.rootRank);
  if (on_device(input))
    return device_->run({.kind = CollectiveKind::kGather, .tensor = input, .root = root}, &Backend::gather, outputs,
                        inputs, given);
  const Tensors parts = rank_ == root ? only(outputs, "gather", size_) : Tensors();
  return start(OpType::GATHER, "lockstep:gather", inputs, parts, given,
               [this, root, all = Concatenated("gather", parts, true), line = flat(input)](const CallOptions& options) {
                 group_->gather(rank_ == root ? all.flat_tensor() : at::Tensor(), line, root, options);
                 all.copy_to_tensors();
               });
}

WorkPtr LockstepBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& given) {
  const at::Tensor& output = only(outputs, "scatter");
  const int root = static_cast<int>(given.rootRank);
  if (on_device(output))
    return device_->run({.kind = CollectiveKind::kScatter, .tensor = output, .root = root}, &Backend::scatter, outputs,
                        inputs, given);
  const Tensors parts = rank_ == root ? only(inputs, "scatter", size_) : Tensors();
  return start_into(output, OpType::SCATTER, "lockstep:scatter", parts, given,
                    [this, root, all = Concatenated("scatter", parts, true)](const at::Tensor& line,
                                                                             const CallOptions& options) mutable {
                      all.copy_from_tensors();
                      group_->scatter(line, rank_ == root ? all.flat_tensor() : at::Tensor(), root, options);
                    });
}

WorkPtr LockstepBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ReduceScatterOptions& given) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  if (on_device(output))
    return device_->run(reduction({.kind = CollectiveKind::kReduceScatter, .tensor = output, .may_shapes_differ = true},
                                  given.reduceOp),
                        &Backend::reduce_scatter, outputs, inputs, given);
  check_reducible(output, given.reduceOp, "reduce_scatter");
  return start_into(output, OpType::REDUCE_SCATTER, "lockstep:reduce_scatter", inputs.at(0), given,
                    [this, all = Concatenated("reduce_scatter", only(inputs, "reduce_scatter", size_), true),
                     op = given.reduceOp](const at::Tensor& line, const CallOptions& options) mutable {
                      all.copy_from_tensors();
                      python::reduce_scatter(*group_, line, all.flat_tensor(), op, options);
                    });
}

WorkPtr LockstepBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& given) {
  if (on_device(output))
    return device_->run(reduction({.kind = CollectiveKind::kReduceScatter, .tensor = output}, given.reduceOp),
                        &Backend::_reduce_scatter_base, output, input, given);
  check_reducible(output, given.reduceOp, "reduce_scatter");
  return start_into(output, OpType::_REDUCE_SCATTER_BASE, "lockstep:reduce_scatter", {input}, given,
                    [this, from = flat(input), op = given.reduceOp](const at::Tensor& to, const CallOptions& options) {
                      python::reduce_scatter(*group_, to, from, op, options);
                    });
}

WorkPtr LockstepBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& given) {
  if (on_device(outputs.at(0)))
    return device_->run(reduction(coalesced(CollectiveKind::kReduceScatter, outputs), given.reduceOp),
                        &Backend::reduce_scatter_tensor_coalesced, outputs, inputs, given);
  check_reducible(outputs.at(0), given.reduceOp, "reduce_scatter");
  return start(OpType::COALESCED, "lockstep:reduce_scatter", inputs, outputs, given,
               [this, outputs, inputs, op = given.reduceOp](const CallOptions& options) {
                 for (std::size_t i = 0; i < outputs.size(); ++i) {
                   const FlatResult to(outputs[i]);
                   python::reduce_scatter(*group_, to.flat_tensor(), flat(inputs[i]), op, options);
                   to.finish();
                 }
               });
}

WorkPtr LockstepBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                                       std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& given) {
  if (on_device(input))
    return device_->run({.kind = CollectiveKind::kAllToAll, .tensor = input, .may_shapes_differ = true},
                        &Backend::alltoall_base, output, input, output_sizes, input_sizes, given);
  if (output_sizes.empty() && input_sizes.empty())
    return start_into(output, OpType::ALLTOALL_BASE, "lockstep:all_to_all", {input}, given,
                      [this, from = flat(input)](const at::Tensor& to, const CallOptions& options) {
                        group_->all_to_all(to, from, options);
                      });
  Tensors outputs = split_rows(output, output_sizes, size_), inputs = split_rows(input, input_sizes, size_);
  return alltoall(outputs, inputs, given);
}

WorkPtr LockstepBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& given) {
  if (on_device(inputs.at(0)))
    return device_->run({.kind = CollectiveKind::kAllToAll, .tensor = inputs.at(0), .may_shapes_differ = true},
                        &Backend::alltoall, outputs, inputs, given);
  only({outputs}, "all_to_all", size_);
  only({inputs}, "all_to_all", size_);
  return start(
      OpType::ALLTOALL, "lockstep:all_to_all", inputs, outputs, given,
      [this, outputs, inputs](const CallOptions& options) { all_to_all_unequal(*group_, outputs, inputs, options); });
}

WorkPtr LockstepBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  if (on_device(tensor))
    return device_->run({.kind = CollectiveKind::kSend, .tensor = tensor, .is_compared = false}, &Backend::send,
                        tensors, to, tag);
  return point_to_point(OpType::SEND, "lockstep:send", tensor,
                        group_->send_async(flat(tensor), to, point_to_point_options(tag)), std::make_shared<int>(rank_),
                        nullptr);
}

WorkPtr LockstepBackend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  if (on_device(tensor))
    return device_->run({.kind = CollectiveKind::kRecv, .tensor = tensor, .is_compared = false}, &Backend::recv,
                        tensors, from, tag);
  const FlatResult line(tensor);
  return point_to_point(OpType::RECV, "lockstep:recv", tensor,
                        group_->recv_async(line.flat_tensor(), from, point_to_point_options(tag)),
                        std::make_shared<int>(from), [line] { line.finish(); });
}

WorkPtr LockstepBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  if (on_device(tensor))
    return device_->run({.kind = CollectiveKind::kRecv, .tensor = tensor, .is_compared = false},
                        &Backend::recvAnysource, tensors, tag);
  const FlatResult line(tensor);
  const auto source = std::make_shared<int>(-1);
  return point_to_point(OpType::RECVANYSOURCE, "lockstep:recvAnySource", tensor,
                        group_->recv_any_async(line.flat_tensor(), source, point_to_point_options(tag)), source,
                        [line] { line.finish(); });
}

WorkPtr LockstepBackend::barrier(const c10d::BarrierOptions& given) {
  if (device_ && given.device && given.device->type() == device_type_)
    return device_->run({}, &Backend::barrier, given);
  return start(OpType::BARRIER, "lockstep:barrier", {}, {}, given,
               [this](const CallOptions& options) { group_->barrier(options); });
}

void LockstepBackend::monitoredBarrier(const c10d::BarrierOptions& given, bool wait_all_ranks) {
  check_open();
  const milliseconds timeout = given.timeout == c10d::kUnsetTimeout ? timeout_.load() : given.timeout;
  const auto store = comm::GroupAccess::store(*group_);
  const MonitoredBarrier barrier{*store, rank_, size_, ++num_monitored_};
  barrier.run(timeout, wait_all_ranks);
}

}  // namespace lockstep::python
