// Allocates shared or local memory for parameters, state and partial sums, and checks parameters for writes.
#include "lockstep/optim/fused/parameter_storage.h"

#define XXH_INLINE_ALL
#include <ATen/ops/all.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/arena/fork_copies.h"
#include "lockstep/comm/reducers/sparse_average.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::inline fused {
namespace {

using base::UsageError;
using Parameter = ddp::GradientSource::Parameter;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }
std::size_t aligned(std::size_t bytes) { return round_up(bytes, kCacheLineBytes); }

c10::StorageImpl* impl_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

/// What a tensor in shared parameters keeps alive. A child made by fork() gets the parameters as this rank sees them,
/// and the state behind them.
struct View {
  View(comm::SharedAllocation the_allocation, std::size_t bytes)
      : allocation(std::move(the_allocation)),
        view(*allocation.memory, bytes),
        copied_view(view.data(), view.size()),
        copied_state(allocation.memory->data() + bytes, allocation.memory->size() - bytes) {}
  const comm::SharedAllocation allocation;
  base::PrivateView view;
  const comm::arena::ForkCopied copied_view, copied_state;
};

/// A DataPtr at `offset` that keeps `view` alive.
at::DataPtr pointer_into(const std::shared_ptr<base::PrivateView>& view, std::size_t offset) {
  auto* owner = new std::shared_ptr<base::PrivateView>(view);
  const auto release = [](void* context) { delete static_cast<std::shared_ptr<base::PrivateView>*>(context); };
  return {view->data() + offset, owner, release, at::kCPU};
}

}  // namespace

ParameterStorage::ParameterStorage(std::shared_ptr<ddp::GradientSource> source, std::size_t num_states,
                                   std::size_t num_partial_sums, bool share, const StateSharding* shards)
    : source_(std::move(source)), parameters_(source_->parameters()), shards_(shards) {
  for (const Parameter& parameter : parameters_) check_parameter(parameter);
  sum_offsets_.push_back(0);
  for (const Parameter& parameter : parameters_)
    sum_offsets_.push_back(sum_offsets_.back() +
                           (static_cast<std::size_t>(parameter.tensor.numel()) + kElementsPerSum - 1) /
                               kElementsPerSum);
  if (share) {
    check_storages();
    std::size_t bytes = assign_offsets() + aligned(num_partial_sums * sum_offsets_.back() * sizeof(double));
    for (std::size_t index = 0; index < parameters_.size(); ++index) bytes += num_states * state_bytes(index);
    move_to_shared_memory(bytes);
  }
  allocate_states(num_states);
  allocate_sums(num_partial_sums);
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    snapshots_.push_back({tensor.const_data_ptr(), tensor.scalar_type(), tensor.strides().vec()});
  }
}

ParameterStorage::~ParameterStorage() {
  if (!is_shared()) return;
  try {
    for (StorageSlot& slot : storages_) {
      if (slot.storage.data() != static_cast<const char*>(view_->data()) + slot.offset) continue;  // no longer here
      at::DataPtr copy = c10::GetCPUAllocator()->allocate(slot.storage.nbytes());
      std::memcpy(copy.get(), slot.storage.data(), slot.storage.nbytes());
      slot.storage.set_data_ptr_noswap(std::move(copy));
    }
  } catch (const std::exception&) {
    // Out of memory: the parameters stay in shared memory, which is correct as long as no rank writes them.
  }
}

void ParameterStorage::check_parameter(const Parameter& parameter) const {
  const at::Tensor& tensor = parameter.tensor;
  const std::string start = "lockstep::optim: parameter " + parameter.name + " ";
  if (!kernels::has_kernel(tensor.scalar_type()))
    throw UsageError(start + "is of " + std::string(c10::toString(tensor.scalar_type())) +
                     "; expected float, double, bfloat16 or half");
  if (!tensor.is_non_overlapping_and_dense())
    throw UsageError(start + "has gaps or overlapping elements in its memory; expected a dense tensor",
                     "use its contiguous()");
}

/// Rejects storages that also hold anything else: its values may differ between ranks, and only parameters may be
/// shared.
void ParameterStorage::check_storages() const {
  std::map<c10::StorageImpl*, std::size_t> used;
  for (const Parameter& parameter : parameters_) used[impl_of(parameter.tensor)] += parameter.tensor.nbytes();
  for (const Parameter& parameter : parameters_)
    if (used[impl_of(parameter.tensor)] < parameter.tensor.storage().nbytes())
      throw UsageError(
          "lockstep::optim: parameter " + parameter.name + " is a part of a tensor of " +
              std::to_string(parameter.tensor.storage().nbytes()) +
              " bytes whose other elements are not parameters; the ranks of a host can share only parameters",
          "clone() the tensor before it is registered");
}

std::size_t ParameterStorage::assign_offsets() {
  std::size_t end = 0;
  for (const Parameter& parameter : parameters_) {
    const auto same = [&](const StorageSlot& slot) {
      return slot.storage.unsafeGetStorageImpl() == impl_of(parameter.tensor);
    };
    if (std::any_of(storages_.begin(), storages_.end(), same)) continue;
    storages_.push_back({parameter.tensor.storage(), end});
    end += aligned(parameter.tensor.storage().nbytes());
  }
  return used_bytes_ = round_up(end, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
}

void ParameterStorage::move_to_shared_memory(std::size_t bytes) {
  allocation_ = source_->allocate_shared(bytes);
  if (allocation_.is_first)
    for (const StorageSlot& slot : storages_)
      std::memcpy(shared_memory() + slot.offset, slot.storage.data(), slot.storage.nbytes());
  source_->host_group().barrier({.name = "parameters of an optimizer"});
  const auto owner = std::make_shared<View>(allocation_, used_bytes_);
  view_ = std::shared_ptr<base::PrivateView>(owner, &owner->view);
  for (StorageSlot& slot : storages_) slot.storage.set_data_ptr_noswap(pointer_into(view_, slot.offset));
  comm::arena::trim_arena();  // gradients may not fit into the holes that the parameters leave
  std::vector<at::Tensor> memory;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    memory.push_back(at::from_blob(
        memory_of(i), tensor.sizes(), tensor.strides(), [owner](void*) {}, tensor.options().requires_grad(false)));
  }
  source_->set_parameter_memory(std::move(memory));
}

std::size_t ParameterStorage::state_bytes(std::size_t index) const {
  return aligned(shard_of(index).count *
                 c10::elementSize(kernels::state_dtype(parameters_[index].tensor.scalar_type())));
}

void ParameterStorage::allocate_states(std::size_t num_states) {
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const at::Tensor& tensor = parameters_[index].tensor;
    const auto options = at::dtype(kernels::state_dtype(tensor.scalar_type())).device(tensor.device());
    const std::vector<std::int64_t> sizes =
        shards_ ? std::vector{static_cast<std::int64_t>(shard_of(index).count)} : tensor.sizes().vec();
    const std::vector<std::int64_t> strides = shards_ ? std::vector{std::int64_t{1}} : tensor.strides().vec();
    std::vector<at::Tensor> states;
    for (std::size_t i = 0; i < num_states; ++i) {
      if (!is_shared()) {
        states.push_back(at::empty_strided(sizes, strides, options).zero_());
        continue;
      }
      void* data = shared_memory() + used_bytes_;
      used_bytes_ += state_bytes(index);
      states.push_back(at::from_blob(data, sizes, strides, [view = view_](void*) {}, options));
    }
    states_.push_back(std::move(states));
  }
}

void ParameterStorage::set_state(std::size_t index, std::size_t i, const at::Tensor& whole) {
  at::Tensor& state = states_[index][i];
  if (!shards_) {
    state.copy_(whole);
    return;
  }
  const at::Tensor& like = parameters_[index].tensor;
  const at::Tensor in_memory_order = at::empty_strided(like.sizes(), like.strides(), whole.options()).copy_(whole);
  const ElementRange range = shard_of(index);
  state.copy_(in_memory_order.as_strided({static_cast<std::int64_t>(range.count)}, {1},
                                         static_cast<std::int64_t>(range.first)));
}

void ParameterStorage::allocate_sums(std::size_t num_partial_sums) {
  num_sum_kinds_ = num_partial_sums;
  if (is_shared()) {
    sums_ = reinterpret_cast<double*>(shared_memory() + used_bytes_);
  } else {
    local_sums_.resize(num_partial_sums * sum_offsets_.back());
    sums_ = local_sums_.data();
  }
}

at::Tensor ParameterStorage::dense_gradient(std::size_t index) const {
  const auto& [name, tensor] = parameters_[index];
  const at::Tensor& gradient = tensor.grad();
  if (gradient.layout() != at::kStrided) comm::reducers::throw_sparse_gradient(name);
  if (gradient.strides() == tensor.strides() && gradient.scalar_type() == tensor.scalar_type()) return gradient;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false)).copy_(gradient);
}

void ParameterStorage::require_same_layout() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const Snapshot& snapshot = snapshots_[i];
    if (tensor.scalar_type() != snapshot.dtype || tensor.strides() != at::IntArrayRef(snapshot.strides) ||
        (is_shared() && tensor.const_data_ptr() != snapshot.data))
      throw UsageError(
          "lockstep::optim: the dtype, shape or memory of parameter " + parameters_[i].name +
              " has changed since its optimizer was made",
          "make the optimizer after the last to() of the module, and write new values with copy_() under NoGradGuard, "
          "or load with lockstep::load(), instead of set_data() and torch::load(), which replace the memory");
  }
}

/// The name of the first parameter that this rank has changed.
const std::string& ParameterStorage::first_changed(const std::vector<base::PrivateView::Range>& changes) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto* data = static_cast<const char*>(parameters_[i].tensor.const_data_ptr());
    const auto begin = static_cast<std::size_t>(data - view_->data()), bytes = parameters_[i].tensor.nbytes();
    const auto overlaps = [&](const auto& range) { return begin < range.end && range.begin < begin + bytes; };
    if (std::any_of(changes.begin(), changes.end(), overlaps) && std::memcmp(data, memory_of(i), bytes) != 0)
      return parameters_[i].name;
  }
  return parameters_.front().name;
}

void ParameterStorage::require_unwritten() {
  if (!is_shared()) return;
  if (const auto changes = view_->changes(); !changes.empty())
    throw UsageError("backward() with update_in_backward() of the optimizer: parameter " + first_changed(changes) +
                         " was changed after the last step",
                     "make the change in change_parameters() of the optimizer");
}

void ParameterStorage::accept_writes() {
  if (!is_shared()) return;
  const auto changes = view_->changes();
  if (changes.empty()) return;
  const std::string& name = first_changed(changes);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const auto& range : changes) {
    XXH3_128bits_update(&state, &range, sizeof(range));
    XXH3_128bits_update(&state, view_->data() + range.begin, range.end - range.begin);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  const at::Tensor own = at::empty({2}, at::kLong);
  std::memcpy(own.mutable_data_ptr(), &hash, sizeof(hash));
  const comm::Group& group = source_->host_group();
  const at::Tensor all = at::empty({group.size(), 2}, at::kLong);
  group.all_gather(all, own, {.name = "parameter " + name + ", changed outside step()"});
  if (!all.eq(own).all().item<bool>())
    throw UsageError(
        "lockstep::optim: parameter " + name + " was changed outside step(), to values that differ between ranks",
        "make the same change on all ranks, or make it in change_parameters() of the optimizer, which gives all ranks "
        "the values of one");
  publish(changes);
}

void ParameterStorage::change(const std::function<void()>& change) {
  accept_writes();
  source_->host_group().barrier({.name = "change_parameters"});  // no rank compares once this one has begun to write
  std::vector<base::PrivateView::Range> changes;
  if (is_primary()) {
    change();
    if (is_shared()) changes = view_->changes();
  }
  publish(changes);
}

/// Makes the primary rank's changes the shared values.
void ParameterStorage::publish(const std::vector<base::PrivateView::Range>& changes) const {
  if (is_primary())
    for (const auto& range : changes)
      std::memcpy(shared_memory() + range.begin, view_->data() + range.begin, range.end - range.begin);
  if (is_shared()) view_->drop(changes);  // until the primary rank is done, other ranks see the values from before
  source_->host_group().barrier({.name = "parameters changed outside step()"});
}

void ParameterStorage::require_unaliased() const {
  std::map<c10::StorageImpl*, std::string> users;
  for (const auto& [name, tensor] : parameters_) {
    const auto [user, is_first] = users.emplace(impl_of(tensor), name);
    if (!is_first)
      throw UsageError("update_in_backward(): parameters " + user->second + " and " + name +
                           " are in one storage, so one could be updated while a graph still needs the other",
                       "disable update_in_backward(), or give each parameter its own memory");
  }
}

}  // namespace lockstep::optim::inline fused
