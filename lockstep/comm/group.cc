#include "lockstep/comm/group.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/stop_signal.h"

namespace lockstep::comm {
namespace {

/// The existing BusyScopes, in the order in which they were created. Never destroyed.
struct BusyStack {
  std::mutex mutex;  // guards `scopes` and the name in the page
  std::vector<std::pair<const BusyScope*, std::string>> scopes;

  void publish_last() const {
    base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
    base::telemetry::RankPage::BusyText what{};
    if (!scopes.empty()) base::telemetry::copy_text(what.text, scopes.back().second);
    page.busy_with.store(what);
    page.alive_count.fetch_add(1);
  }
};

BusyStack& busy_stack() {
  static auto* stack = new BusyStack;
  return *stack;
}

using base::UsageError;
using Impl = GroupAccess::Impl;

/// Throws UsageError if several elements of `tensor` share memory, as after expand(): it cannot hold a result.
void check_writable(CollectiveKind kind, const at::Tensor& tensor) {
  if (!tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    throw UsageError(std::string(name(kind)) + ": several elements of " + describe(tensor) +
                     " share memory, as after expand(); expected a tensor without overlaps. Pass a clone()");
}

/// Makes a request that works in place: on the tensor itself or, if it is not contiguous, on a copy that is copied
/// back.
CollectiveRequest make_in_place_request(Collective&& op, const at::Tensor& tensor, bool result_here) {
  if (result_here) check_writable(op.kind, tensor);
  CollectiveRequest request(std::move(op), channel::SignatureShape(tensor));
  request.op.input = tensor.contiguous();
  request.op.output = request.op.input;
  if (result_here && !request.op.input.is_same(tensor))
    request.complete = [tensor, copy = request.op.input] { tensor.copy_(copy); };
  return request;
}

/// Makes a request from one tensor to another. The ranks compare the shape of `compared`.
CollectiveRequest make_out_of_place_request(Collective&& op, const at::Tensor& output, const at::Tensor& input,
                                            const at::Tensor& compared) {
  if (output.defined()) check_writable(op.kind, output);
  CollectiveRequest request(std::move(op), channel::SignatureShape(compared));
  if (input.defined()) request.op.input = input.contiguous();
  if (!output.defined()) return request;
  request.op.output = output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  if (!request.op.output.is_same(output)) request.complete = [output, copy = request.op.output] { output.copy_(copy); };
  return request;
}

constexpr std::size_t kMaxByteStringSize = std::size_t{1} << 30;

std::int64_t element_count(const channel::CallSignature& call) {
  std::int64_t count = 1;
  for (int d = 0; d < call.dims; ++d) count *= call.sizes[d];
  return count;
}

at::Tensor bytes_to_tensor(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string tensor_to_bytes(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

/// Throws UsageError unless `whole` has `count` times as many elements as `part`, and the same dtype and device.
void check_parts(CollectiveKind kind, const at::Tensor& whole, const at::Tensor& part, std::size_t count) {
  if (!whole.defined() || !part.defined()) throw UsageError(std::string(name(kind)) + ": a tensor is undefined");
  if (whole.scalar_type() != part.scalar_type() || whole.numel() != part.numel() * static_cast<std::int64_t>(count))
    throw UsageError(std::string(name(kind)) + ": " + describe(whole) + " does not hold " + std::to_string(count) +
                     " parts of " + describe(part));
  if (whole.device() != part.device())
    throw UsageError(std::string(name(kind)) + ": " + describe(whole) + " is on " + whole.device().str() + " and " +
                     describe(part) + " on " + part.device().str() + "; both must be on one device");
}

CollectiveRequest all_reduce_request(Impl& impl, const at::Tensor& tensor, ReduceOp op, const CallOptions& options) {
  Collective collective = impl.make_collective(CollectiveKind::kAllReduce, tensor, options, 0, op);
  impl.check_wire_dtype(tensor, op, options.wire_dtype);
  collective.wire_dtype = options.wire_dtype;
  return make_in_place_request(std::move(collective), tensor, true);
}

CollectiveRequest reduce_request(Impl& impl, const at::Tensor& tensor, int root, ReduceOp op,
                                 const CallOptions& options) {
  return make_in_place_request(impl.make_collective(CollectiveKind::kReduce, tensor, options, root, op), tensor,
                               root == impl.rank);
}

CollectiveRequest broadcast_request(Impl& impl, const at::Tensor& tensor, int root, const CallOptions& options) {
  return make_in_place_request(impl.make_collective(CollectiveKind::kBroadcast, tensor, options, root), tensor,
                               root != impl.rank);
}

CollectiveRequest all_gather_request(Impl& impl, const at::Tensor& output, const at::Tensor& input,
                                     const CallOptions& options) {
  Collective collective = impl.make_collective(CollectiveKind::kAllGather, input, options);
  check_parts(CollectiveKind::kAllGather, output, input, impl.members.size());
  return make_out_of_place_request(std::move(collective), output, input, input);
}

CollectiveRequest reduce_scatter_request(Impl& impl, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                         const CallOptions& options) {
  Collective collective = impl.make_collective(CollectiveKind::kReduceScatter, output, options, 0, op);
  check_parts(CollectiveKind::kReduceScatter, input, output, impl.members.size());
  return make_out_of_place_request(std::move(collective), output, input, output);
}

CollectiveRequest gather_request(Impl& impl, const at::Tensor& output, const at::Tensor& input, int root,
                                 const CallOptions& options) {
  Collective collective = impl.make_collective(CollectiveKind::kGather, input, options, root);
  if (impl.rank == root) check_parts(CollectiveKind::kGather, output, input, impl.members.size());
  return make_out_of_place_request(std::move(collective), impl.rank == root ? output : at::Tensor(), input, input);
}

CollectiveRequest scatter_request(Impl& impl, const at::Tensor& output, const at::Tensor& input, int root,
                                  const CallOptions& options) {
  Collective collective = impl.make_collective(CollectiveKind::kScatter, output, options, root);
  if (impl.rank == root) check_parts(CollectiveKind::kScatter, input, output, impl.members.size());
  return make_out_of_place_request(std::move(collective), output, impl.rank == root ? input : at::Tensor(), output);
}

CollectiveRequest all_to_all_request(Impl& impl, const at::Tensor& output, const at::Tensor& input,
                                     const CallOptions& options) {
  Collective collective = impl.make_collective(CollectiveKind::kAllToAll, input, options);
  check_parts(CollectiveKind::kAllToAll, output, input, 1);
  if (input.numel() % static_cast<std::int64_t>(impl.members.size()) != 0)
    throw UsageError("all_to_all: " + describe(input) + " cannot be split into " + std::to_string(impl.members.size()) +
                     " equal parts");
  return make_out_of_place_request(std::move(collective), output, input, input);
}

CollectiveRequest barrier_request(Impl& impl, const CallOptions& options) {
  CollectiveRequest request(impl.make_collective(CollectiveKind::kBarrier, {}, options));
  request.moves_data = false;
  return request;
}

/// Gathers equal parts of the size of the largest input, which the comparison of signatures reveals. `outputs` must
/// stay valid until the operation is done.
CollectiveRequest all_gather_unequal_request(Impl& impl, std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                             const CallOptions& options) {
  CollectiveRequest request(impl.make_collective(CollectiveKind::kAllGather, input, options),
                            channel::SignatureShape(input, /*ranks_may_differ=*/true));
  auto gathered = std::make_shared<std::pair<at::Tensor, std::vector<channel::CallSignature>>>();
  request.prepare = [gathered, input](Collective& op, const std::vector<channel::CallSignature>& calls) {
    std::int64_t largest = 0;
    for (const channel::CallSignature& call : calls) largest = std::max(largest, element_count(call));
    op.input = at::zeros({largest}, input.options());
    op.input.narrow(0, 0, input.numel()).copy_(input.flatten());
    op.output = at::empty({largest * static_cast<std::int64_t>(calls.size())}, input.options());
    *gathered = {op.output, calls};
  };
  request.complete = [gathered, &outputs] {
    const auto& [all, calls] = *gathered;
    const std::int64_t stride = all.numel() / static_cast<std::int64_t>(calls.size());
    outputs.clear();
    for (std::size_t r = 0; r < calls.size(); ++r)
      outputs.push_back(all.narrow(0, static_cast<std::int64_t>(r) * stride, element_count(calls[r]))
                            .view(at::IntArrayRef(calls[r].sizes, calls[r].dims))
                            .clone());
  };
  return request;
}

/// The comparison of signatures reveals the root's length; the other ranks then allocate their tensor.
CollectiveRequest broadcast_bytes_request(Impl& impl, std::string& bytes, int root, const CallOptions& options) {
  if (bytes.size() > kMaxByteStringSize)
    throw UsageError("broadcast_bytes: " + std::to_string(bytes.size()) + " bytes; expected at most 1073741824");
  const at::Tensor mine = impl.rank == root ? bytes_to_tensor(bytes) : at::empty({0}, at::kByte);
  CollectiveRequest request(impl.make_collective(CollectiveKind::kBroadcast, mine, options, root),
                            channel::SignatureShape(mine, /*ranks_may_differ=*/true));
  auto payload = std::make_shared<at::Tensor>();
  request.prepare = [payload, mine, root, here = impl.rank](Collective& op,
                                                            const std::vector<channel::CallSignature>& calls) {
    *payload = here == root ? mine : at::empty({calls[static_cast<std::size_t>(root)].sizes[0]}, at::kByte);
    op.input = op.output = *payload;
  };
  request.complete = [payload, &bytes] { bytes = tensor_to_bytes(*payload); };
  return request;
}

}  // namespace

BusyScope::BusyScope(const std::string& what) {
  const std::lock_guard lock(busy_stack().mutex);
  busy_stack().scopes.emplace_back(this, what);
  busy_stack().publish_last();
  base::telemetry::RankPage::this_process().busy_depth.fetch_add(1);
}

BusyScope::~BusyScope() {
  const std::lock_guard lock(busy_stack().mutex);
  std::erase_if(busy_stack().scopes, [this](const auto& scope) { return scope.first == this; });
  busy_stack().publish_last();
  base::telemetry::RankPage::this_process().busy_depth.fetch_sub(1);
}

Group::Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Group::Group(std::shared_ptr<World> world) {
  std::vector<int> all(static_cast<std::size_t>(world->identity.world_size));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  const int rank = world->identity.rank;
  impl_ = base::make_process_owned<Impl>(std::move(world), "world", std::move(all), rank);
}

int Group::rank() const { return impl_->rank; }
int Group::size() const { return static_cast<int>(impl_->members.size()); }
int Group::global_rank(int rank) const { return impl_->members.at(static_cast<std::size_t>(rank)); }
int Group::local_rank() const { return impl_->world->identity.local_rank; }
int Group::local_size() const { return impl_->world->identity.local_world_size; }
int Group::node_rank() const { return impl_->world->identity.node_rank; }
int Group::num_nodes() const { return impl_->world->identity.num_nodes; }
at::Device Group::device() const { return impl_->world->device; }
const std::string& Group::name() const { return impl_->name; }
std::string_view Group::transport() const { return impl_->world->transport; }
void Group::step() const {
  GroupAccess::set_steps(*this, steps() + 1);
  std::vector<std::weak_ptr<const std::function<void()>>> observers;
  {
    const std::lock_guard lock(impl_->steps_mutex);
    observers = impl_->step_observers;
  }
  for (const auto& weak : observers)
    if (const auto observer = weak.lock()) (*observer)();
}
std::int64_t Group::steps() const { return impl_->steps.load(std::memory_order_relaxed); }
void Group::alive() const {
  base::telemetry::RankPage::this_process().alive_count.fetch_add(1, std::memory_order_relaxed);
}
bool Group::stop_requested() const {
  install_stop_signal_handlers();
  return impl_->world->stop_agreed || (impl_->world->identity.world_size == 1 && has_stop_signal());
}

// Each operation has one function above that makes its CollectiveRequest. The _async form differs only in that it does
// not wait.

void Group::all_reduce(const at::Tensor& tensor, ReduceOp op, const CallOptions& options) const {
  impl_->run(all_reduce_request(*impl_, tensor, op, options));
}
Work Group::all_reduce_async(const at::Tensor& tensor, ReduceOp op, const CallOptions& options) const {
  return impl_->run_async(all_reduce_request(*impl_, tensor, op, options));
}

void Group::reduce(const at::Tensor& tensor, int root, ReduceOp op, const CallOptions& options) const {
  impl_->run(reduce_request(*impl_, tensor, root, op, options));
}
Work Group::reduce_async(const at::Tensor& tensor, int root, ReduceOp op, const CallOptions& options) const {
  return impl_->run_async(reduce_request(*impl_, tensor, root, op, options));
}

void Group::broadcast(const at::Tensor& tensor, int root, const CallOptions& options) const {
  impl_->run(broadcast_request(*impl_, tensor, root, options));
}
Work Group::broadcast_async(const at::Tensor& tensor, int root, const CallOptions& options) const {
  return impl_->run_async(broadcast_request(*impl_, tensor, root, options));
}

void Group::all_gather(const at::Tensor& output, const at::Tensor& input, const CallOptions& options) const {
  impl_->run(all_gather_request(*impl_, output, input, options));
}
Work Group::all_gather_async(const at::Tensor& output, const at::Tensor& input, const CallOptions& options) const {
  return impl_->run_async(all_gather_request(*impl_, output, input, options));
}

void Group::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                           const CallOptions& options) const {
  impl_->run(reduce_scatter_request(*impl_, output, input, op, options));
}
Work Group::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                 const CallOptions& options) const {
  return impl_->run_async(reduce_scatter_request(*impl_, output, input, op, options));
}

void Group::gather(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options) const {
  impl_->run(gather_request(*impl_, output, input, root, options));
}
Work Group::gather_async(const at::Tensor& output, const at::Tensor& input, int root,
                         const CallOptions& options) const {
  return impl_->run_async(gather_request(*impl_, output, input, root, options));
}

void Group::scatter(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options) const {
  impl_->run(scatter_request(*impl_, output, input, root, options));
}
Work Group::scatter_async(const at::Tensor& output, const at::Tensor& input, int root,
                          const CallOptions& options) const {
  return impl_->run_async(scatter_request(*impl_, output, input, root, options));
}

void Group::all_to_all(const at::Tensor& output, const at::Tensor& input, const CallOptions& options) const {
  impl_->run(all_to_all_request(*impl_, output, input, options));
}
Work Group::all_to_all_async(const at::Tensor& output, const at::Tensor& input, const CallOptions& options) const {
  return impl_->run_async(all_to_all_request(*impl_, output, input, options));
}

void Group::barrier(const CallOptions& options) const { impl_->run(barrier_request(*impl_, options)); }
Work Group::barrier_async(const CallOptions& options) const {
  return impl_->run_async(barrier_request(*impl_, options));
}

std::vector<at::Tensor> Group::all_gather_unequal(const at::Tensor& input, const CallOptions& options) const {
  std::vector<at::Tensor> outputs;
  impl_->run(all_gather_unequal_request(*impl_, outputs, input, options));
  return outputs;
}
Work Group::all_gather_unequal_async(std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                     const CallOptions& options) const {
  return impl_->run_async(all_gather_unequal_request(*impl_, outputs, input, options));
}

void Group::send(const at::Tensor& tensor, int to, const CallOptions& options) const {
  impl_->run_point_to_point(CollectiveKind::kSend, tensor, to, options);
}
Work Group::send_async(const at::Tensor& tensor, int to, const CallOptions& options) const {
  return impl_->start_point_to_point(CollectiveKind::kSend, tensor, to, options);
}
void Group::recv(const at::Tensor& tensor, int from, const CallOptions& options) const {
  impl_->run_point_to_point(CollectiveKind::kRecv, tensor, from, options);
}
Work Group::recv_async(const at::Tensor& tensor, int from, const CallOptions& options) const {
  return impl_->start_point_to_point(CollectiveKind::kRecv, tensor, from, options);
}
int Group::recv_any(const at::Tensor& tensor, const CallOptions& options) const {
  return impl_->run_receive_any(tensor, options);
}
Work Group::recv_any_async(const at::Tensor& tensor, std::shared_ptr<int> source, const CallOptions& options) const {
  return impl_->start_receive_any(tensor, std::move(source), options);
}

std::string Group::broadcast_bytes(const std::string& bytes, int root, const CallOptions& options) const {
  std::string result = rank() == root ? bytes : std::string();
  impl_->run(broadcast_bytes_request(*impl_, result, root, options));
  return result;
}

std::vector<std::string> Group::all_gather_bytes(const std::string& bytes, const CallOptions& options) const {
  if (bytes.size() > kMaxByteStringSize)
    throw UsageError("all_gather_bytes: " + std::to_string(bytes.size()) + " bytes; expected at most 1073741824");
  std::vector<std::string> all;
  for (const at::Tensor& part : all_gather_unequal(bytes_to_tensor(bytes), options))
    all.push_back(tensor_to_bytes(part));
  return all;
}

Group Group::split(int color, int key) const {
  if (color < 0) throw UsageError("split: color is " + std::to_string(color) + "; expected 0 or more");
  const at::Tensor mine = at::tensor({static_cast<std::int64_t>(color), static_cast<std::int64_t>(key)}, at::kLong);
  const at::Tensor all = at::empty({2 * static_cast<std::int64_t>(size())}, at::kLong);
  all_gather(all, mine, {.name = "split"});
  const auto* pairs = all.const_data_ptr<std::int64_t>();
  std::vector<std::pair<std::int64_t, int>> chosen;  // (key, rank in this group)
  for (int r = 0; r < size(); ++r)
    if (pairs[2 * r] == color) chosen.emplace_back(pairs[2 * r + 1], r);
  std::sort(chosen.begin(), chosen.end());
  std::vector<int> members;
  int child_rank = 0;
  for (const auto& [order, r] : chosen) {
    if (r == rank()) child_rank = static_cast<int>(members.size());
    members.push_back(impl_->members[static_cast<std::size_t>(r)]);
  }
  const std::string child = name() + "." + std::to_string(impl_->num_splits++) + "[" + std::to_string(color) + "]";
  return Group(
      base::make_process_owned<Impl>(impl_->world, child, std::move(members), child_rank, impl_->split_parent(color)));
}

Group Group::split_by_host() const {
  return split(impl_->world->identity.host_indices[static_cast<std::size_t>(impl_->world->identity.rank)]);
}

}  // namespace lockstep::comm
