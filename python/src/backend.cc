// The backend "lockstep" of torch.distributed: c10d's operations, executed by a Group. Results are those of c10d's
// Gloo; before data moves, the ranks compare what they call.
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/init.h"
#include "python/src/backend_work.h"
#include "python/src/bindings.h"
#include "python/src/flat.h"
#include "python/src/monitored_barrier.h"

namespace lockstep::python {
namespace {

using c10d::OpType;
using comm::CallOptions;
using comm::Group;
using comm::ReduceOp;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A reduction of c10d as one of Group, or none for those on bits.
std::optional<ReduceOp> to_reduce_op(const c10d::ReduceOp& op, const char* call) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return ReduceOp::kMean;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR: return std::nullopt;
    case c10d::ReduceOp::PREMUL_SUM:
    case c10d::ReduceOp::UNUSED: break;
  }
  throw base::UsageError(std::string(call) +
                         ": the backend lockstep does not have this reduction; expected SUM, AVG, " +
                         "PRODUCT, MIN, MAX, BAND, BOR or BXOR");
}

/// all_reduce() of the bits of integers.
void all_reduce_bits(const Group& group, at::Tensor line, c10d::ReduceOp::RedOpType op, const CallOptions& options) {
  if (at::isFloatingType(line.scalar_type()))
    throw base::UsageError("all_reduce: BAND, BOR and BXOR of " + comm::describe(line) + "; expected integers");
  const at::Tensor all = at::empty({group.size(), line.numel()}, line.options());
  group.all_gather(all, line, options);
  line.copy_(all[0]);
  for (int rank = 1; rank < group.size(); ++rank) {
    if (op == c10d::ReduceOp::BAND)
      line.bitwise_and_(all[rank]);
    else if (op == c10d::ReduceOp::BOR)
      line.bitwise_or_(all[rank]);
    else
      line.bitwise_xor_(all[rank]);
  }
}

void all_reduce(const Group& group, const at::Tensor& line, const c10d::ReduceOp& op, const CallOptions& options) {
  if (const auto plain = to_reduce_op(op, "all_reduce")) return group.all_reduce(line, *plain, options);
  all_reduce_bits(group, line, op, options);
}

/// Sums sparse tensors, whose ranks may have different numbers of elements.
void all_reduce_sparse(const Group& group, at::Tensor& tensor, const c10d::ReduceOp& op, const CallOptions& options) {
  if (op != c10d::ReduceOp::SUM) throw base::UsageError("all_reduce: a sparse tensor can be summed only");
  const at::Tensor own = tensor.coalesce();
  const Tensors indices = group.all_gather_unequal(own.indices().contiguous(), options);
  const Tensors values = group.all_gather_unequal(own.values().contiguous(), options);
  at::Tensor sum = at::sparse_coo_tensor(indices[0], values[0], own.sizes());
  for (std::size_t i = 1; i < indices.size(); ++i)
    sum = sum.add(at::sparse_coo_tensor(indices[i], values[i], own.sizes()));
  tensor.copy_(sum.coalesce());
}

const at::Tensor& only(const Tensors& tensors, const char* call) {
  if (tensors.size() != 1)
    throw base::UsageError(std::string(call) + ": " + std::to_string(tensors.size()) + " tensors; expected one");
  return tensors[0];
}

const Tensors& only(const TensorLists& lists, const char* call, int size) {
  if (lists.size() != 1 || static_cast<int>(lists[0].size()) != size)
    throw base::UsageError(std::string(call) + ": the list has " + std::to_string(lists.empty() ? 0 : lists[0].size()) +
                           " tensors; expected one for each of the " + std::to_string(size) + " ranks");
  return lists[0];
}

/// Offsets of parts of a tensor of `count` rows with these sizes, or with equal ones if there are none; one more than
/// parts.
std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& sizes, std::int64_t rows, int parts) {
  if (!sizes.empty() && static_cast<int>(sizes.size()) != parts)
    throw base::UsageError("all_to_all: " + std::to_string(sizes.size()) + " split sizes; expected " +
                           std::to_string(parts));
  std::vector<std::int64_t> offsets{0};
  for (int i = 0; i < parts; ++i)
    offsets.push_back(offsets.back() + (sizes.empty() ? rows / parts : sizes[static_cast<std::size_t>(i)]));
  if (offsets.back() != rows)
    throw base::UsageError("all_to_all: parts of " + std::to_string(offsets.back()) + " rows of a tensor that has " +
                           std::to_string(rows));
  return offsets;
}

/// all_to_all() of parts of different sizes: each part is padded to the largest one of all ranks.
void all_to_all_unequal(const Group& group, const Tensors& outputs, const Tensors& inputs, const CallOptions& options) {
  std::int64_t largest = 0;
  for (const at::Tensor& part : inputs) largest = std::max(largest, part.numel());
  const at::Tensor agreed = at::tensor({largest}, at::kLong);
  group.all_reduce(agreed, ReduceOp::kMax, options);
  largest = agreed.item<std::int64_t>();
  if (largest == 0) return;
  const at::TensorOptions like = inputs[0].options().memory_format(std::nullopt);
  const at::Tensor sent = at::empty({group.size(), largest}, like), received = at::empty({group.size(), largest}, like);
  for (int rank = 0; rank < group.size(); ++rank) {
    const at::Tensor& part = inputs[static_cast<std::size_t>(rank)];
    sent[rank].narrow(0, 0, part.numel()).copy_(part.reshape({-1}));
  }
  group.all_to_all(received.view({-1}), sent.view({-1}), options);
  for (int rank = 0; rank < group.size(); ++rank) {
    const at::Tensor& part = outputs[static_cast<std::size_t>(rank)];
    part.copy_(received[rank].narrow(0, 0, part.numel()).view(part.sizes()));
  }
}

class LockstepBackend final : public c10d::Backend {
 public:
  LockstepBackend(Group group, c10::intrusive_ptr<c10d::Store> store, milliseconds timeout)
      : Backend(group.rank(), group.size()), group_(std::move(group)), store_(std::move(store)), timeout_(timeout) {}

  /// Ends the group: destroy_process_group() and the end of the program call it. Blocks until what is queued has ended.
  void shutdown() override {
    executor_.reset();
    group_.reset();
  }

  const std::string getBackendName() const override { return "lockstep"; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return num_operations_; }
  bool supportsCoalescing() const override { return false; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& given) override {
    const FlatResult line(only(tensors, "broadcast"));
    return start(OpType::BROADCAST, "lockstep:broadcast", tensors, tensors, given,
                 [this, line, root = given.rootRank](const CallOptions& options) {
                   group_->broadcast(line.flat_tensor(), static_cast<int>(root), options);
                   line.finish();
                 });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    if (only(tensors, "all_reduce").is_sparse())
      return start(OpType::ALLREDUCE, "lockstep:all_reduce", tensors, tensors, given,
                   [this, tensor = tensors[0], op = given.reduceOp](const CallOptions& options) mutable {
                     all_reduce_sparse(*group_, tensor, op, options);
                   });
    const FlatResult line(tensors[0]);
    return start(OpType::ALLREDUCE, "lockstep:all_reduce", tensors, tensors, given,
                 [this, line, op = given.reduceOp](const CallOptions& options) {
                   all_reduce(*group_, line.flat_tensor(), op, options);
                   line.finish();
                 });
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    return allreduce(tensors, given);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    return start(OpType::ALLREDUCE_COALESCED, "lockstep:all_reduce", tensors, tensors, given,
                 [this, all = Concatenated("all_reduce_coalesced", tensors, false),
                  op = given.reduceOp](const CallOptions& options) mutable {
                   all.copy_from_tensors();
                   all_reduce(*group_, all.flat_tensor(), op, options);
                   all.copy_to_tensors();
                 });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    const FlatResult line(only(tensors, "reduce"));
    const auto plain = to_reduce_op(given.reduceOp, "reduce");
    return start(
        OpType::REDUCE, "lockstep:reduce", tensors, tensors, given,
        [this, line, plain, op = given.reduceOp, root = static_cast<int>(given.rootRank)](const CallOptions& options) {
          if (plain)
            group_->reduce(line.flat_tensor(), root, *plain, options);
          else
            all_reduce_bits(*group_, line.flat_tensor(), op, options);
          line.finish();
        });
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& given) override {
    const Tensors& parts = only(outputs, "all_gather", size_);
    return start(OpType::ALLGATHER, "lockstep:all_gather", inputs, parts, given,
                 [this, all = Concatenated("all_gather", parts, true),
                  line = flat(only(inputs, "all_gather"))](const CallOptions& options) {
                   group_->all_gather(all.flat_tensor(), line, options);
                   all.copy_to_tensors();
                 });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& given) override {
    return start(OpType::_ALLGATHER_BASE, "lockstep:all_gather", {input}, {output}, given,
                 [this, to = FlatResult(output), from = flat(input)](const CallOptions& options) {
                   group_->all_gather(to.flat_tensor(), from, options);
                   to.finish();
                 });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& given) override {
    return start(OpType::COALESCED, "lockstep:all_gather", inputs, outputs, given,
                 [this, outputs, inputs](const CallOptions& options) {
                   for (std::size_t i = 0; i < outputs.size(); ++i) {
                     const FlatResult to(outputs[i]);
                     group_->all_gather(to.flat_tensor(), flat(inputs[i]), options);
                     to.finish();
                   }
                 });
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& given) override {
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

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& given) override {
    const int root = static_cast<int>(given.rootRank);
    const Tensors parts = rank_ == root ? only(outputs, "gather", size_) : Tensors();
    return start(OpType::GATHER, "lockstep:gather", inputs, parts, given,
                 [this, root, all = Concatenated("gather", parts, true),
                  line = flat(only(inputs, "gather"))](const CallOptions& options) {
                   group_->gather(rank_ == root ? all.flat_tensor() : at::Tensor(), line, root, options);
                   all.copy_to_tensors();
                 });
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& given) override {
    const int root = static_cast<int>(given.rootRank);
    const Tensors parts = rank_ == root ? only(inputs, "scatter", size_) : Tensors();
    return start(OpType::SCATTER, "lockstep:scatter", parts, outputs, given,
                 [this, root, line = FlatResult(only(outputs, "scatter")),
                  all = Concatenated("scatter", parts, true)](const CallOptions& options) mutable {
                   all.copy_from_tensors();
                   group_->scatter(line.flat_tensor(), rank_ == root ? all.flat_tensor() : at::Tensor(), root, options);
                   line.finish();
                 });
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& given) override {
    return start(OpType::REDUCE_SCATTER, "lockstep:reduce_scatter", inputs.at(0), outputs, given,
                 [this, line = FlatResult(only(outputs, "reduce_scatter")),
                  all = Concatenated("reduce_scatter", only(inputs, "reduce_scatter", size_), true),
                  op = given.reduceOp](const CallOptions& options) mutable {
                   all.copy_from_tensors();
                   reduce_scatter_flat(line, all.flat_tensor(), op, options);
                 });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& given) override {
    return start(OpType::_REDUCE_SCATTER_BASE, "lockstep:reduce_scatter", {input}, {output}, given,
                 [this, line = FlatResult(output), from = flat(input),
                  op = given.reduceOp](const CallOptions& options) { reduce_scatter_flat(line, from, op, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& given) override {
    return start(OpType::COALESCED, "lockstep:reduce_scatter", inputs, outputs, given,
                 [this, outputs, inputs, op = given.reduceOp](const CallOptions& options) {
                   for (std::size_t i = 0; i < outputs.size(); ++i)
                     reduce_scatter_flat(FlatResult(outputs[i]), flat(inputs[i]), op, options);
                 });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& given) override {
    if (output_sizes.empty() && input_sizes.empty())
      return start(OpType::ALLTOALL_BASE, "lockstep:all_to_all", {input}, {output}, given,
                   [this, to = FlatResult(output), from = flat(input)](const CallOptions& options) {
                     group_->all_to_all(to.flat_tensor(), from, options);
                     to.finish();
                   });
    const auto to = offsets_of(output_sizes, output.size(0), size_);
    const auto from = offsets_of(input_sizes, input.size(0), size_);
    Tensors outputs, inputs;
    for (std::size_t i = 0; i < static_cast<std::size_t>(size_); ++i) {
      outputs.push_back(output.narrow(0, to[i], to[i + 1] - to[i]));
      inputs.push_back(input.narrow(0, from[i], from[i + 1] - from[i]));
    }
    return alltoall(outputs, inputs, given);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& given) override {
    only({outputs}, "all_to_all", size_);
    only({inputs}, "all_to_all", size_);
    return start(
        OpType::ALLTOALL, "lockstep:all_to_all", inputs, outputs, given,
        [this, outputs, inputs](const CallOptions& options) { all_to_all_unequal(*group_, outputs, inputs, options); });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const at::Tensor& tensor = only(tensors, "send");
    return point_to_point(OpType::SEND, "lockstep:send", tensor,
                          group_->send_async(flat(tensor), to, point_to_point_options(tag)),
                          std::make_shared<int>(rank_), nullptr);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const FlatResult line(only(tensors, "recv"));
    return point_to_point(OpType::RECV, "lockstep:recv", tensors[0],
                          group_->recv_async(line.flat_tensor(), from, point_to_point_options(tag)),
                          std::make_shared<int>(from), [line] { line.finish(); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    const FlatResult line(only(tensors, "recv"));
    const auto source = std::make_shared<int>(-1);
    return point_to_point(OpType::RECVANYSOURCE, "lockstep:recvAnySource", tensors[0],
                          group_->recv_any_async(line.flat_tensor(), source, point_to_point_options(tag)), source,
                          [line] { line.finish(); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& given) override {
    return start(OpType::BARRIER, "lockstep:barrier", {}, {}, given,
                 [this](const CallOptions& options) { group_->barrier(options); });
  }
  /// Goes through the store of torch.distributed: neither a rank that does not come nor a timeout ends the group.
  void monitoredBarrier(const c10d::BarrierOptions& given, bool wait_all_ranks) override {
    check_open();
    const milliseconds timeout = given.timeout == c10d::kUnsetTimeout ? timeout_.load() : given.timeout;
    const MonitoredBarrier barrier{*store_, rank_, size_,
                                   group_->name() + "/monitored_barrier/" + std::to_string(++num_monitored_)};
    barrier.run(timeout, wait_all_ranks);
  }

 private:
  CallOptions call_options(milliseconds timeout) const {
    const milliseconds limit = timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
    return limit.count() > 0 ? CallOptions{.deadline = base::Deadline::in(limit)} : CallOptions{};
  }
  WorkPtr point_to_point(OpType type, const char* title, const at::Tensor& tensor, comm::Work work,
                         std::shared_ptr<int> source, std::function<void()> complete) const {
    return c10::make_intrusive<PointToPointWork>(rank_, type, title, tensor, std::move(work), std::move(source),
                                                 std::move(complete));
  }
  void check_open() const {
    if (!group_) throw base::UsageError("the process group has been destroyed");
  }
  CallOptions point_to_point_options(int tag) const {
    check_open();
    CallOptions options = call_options(c10d::kUnsetTimeout);
    if (tag != 0) options.name = "tag " + std::to_string(tag);
    return options;
  }

  void reduce_scatter_flat(const FlatResult& to, const at::Tensor& from, const c10d::ReduceOp& op,
                           const CallOptions& options) {
    const auto plain = to_reduce_op(op, "reduce_scatter");
    if (!plain) throw base::UsageError("reduce_scatter: expected SUM, AVG, PRODUCT, MIN or MAX");
    group_->reduce_scatter(to.flat_tensor(), from, *plain, options);
    to.finish();
  }

  /// Runs `operation`: on this thread if the caller waits for it at once and nothing is queued, else on the executor's.
  /// `inputs` are for the profiler.
  template <typename Options, typename Operation>
  WorkPtr start(OpType type, const char* title, const Tensors& inputs, Tensors results, const Options& given,
                Operation operation) {
    check_open();
    ++num_operations_;
    auto work = c10::make_intrusive<CollectiveWork>(rank_, type, title, inputs, std::move(results));
    auto run = [operation = std::move(operation), options = call_options(given.timeout)]() mutable {
      operation(options);
    };
    if (!given.asyncOp && executor_->is_idle())
      work->execute(std::move(run));
    else
      executor_->post([work, run = std::move(run)] { work->execute(run); });
    return work;
  }

  std::optional<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;  // of this process group
  std::uint64_t num_monitored_ = 0;              // barriers
  std::atomic<milliseconds> timeout_;
  std::atomic<std::uint64_t> num_operations_{0};
  std::optional<comm::channel::SerialExecutor> executor_{std::in_place};  // last member: ends before what it uses
};

/// The backends of this process, for close_backends(). Guarded by the GIL.
std::vector<c10::weak_intrusive_ptr<LockstepBackend>>& backends() {
  static auto* const all = new std::vector<c10::weak_intrusive_ptr<LockstepBackend>>;  // never destroyed
  return *all;
}

/// Ends the groups that the program has not destroyed.
void close_backends() {
  for (const auto& one : std::exchange(backends(), {})) {
    const auto backend = one.lock();
    const py::gil_scoped_release release;
    if (backend) backend->shutdown();
  }
}

}  // namespace

void bind_backend(py::module_& module) {
  module.def(
      "make_backend",
      [](const Group& world, std::string name, std::vector<int> members, c10::intrusive_ptr<c10d::Store> store,
         double timeout) -> c10::intrusive_ptr<c10d::Backend> {
        c10::intrusive_ptr<LockstepBackend> made;
        {
          const py::gil_scoped_release release;
          made = c10::make_intrusive<LockstepBackend>(
              comm::GroupAccess::make_group(world, std::move(name), std::move(members)), std::move(store),
              milliseconds(static_cast<std::int64_t>(timeout * 1e3)));
        }
        backends().emplace_back(made);
        return made;
      },
      py::arg("world"), py::arg("name"), py::arg("members"), py::arg("store"), py::arg("timeout"));
  module.def("close_backends", close_backends);
  module.def(
      "init_over",
      [](int rank, int size, std::string towards, py::function exchange, double timeout) {
        comm::ExternalRendezvous rendezvous{.rank = rank, .world_size = size, .towards = std::move(towards)};
        rendezvous.exchange = [&exchange](const std::string& text, base::Deadline) {
          const py::gil_scoped_acquire gil;
          return std::string(exchange(py::bytes(text)).cast<py::bytes>());
        };
        const auto limit = milliseconds(static_cast<std::int64_t>(timeout * 1e3));
        const py::gil_scoped_release release;
        return comm::init({.device = "cpu", .join_timeout = limit, .timeout = limit}, rendezvous);
      },
      py::arg("rank"), py::arg("size"), py::arg("towards"), py::arg("exchange"), py::arg("timeout"));
}

}  // namespace lockstep::python
