#include "lockstep/optim/fused/parameter_storage.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {
namespace {

using base::UsageError;
using Parameter = ddp::GradientSource::Parameter;

constexpr std::size_t kLine = 64;  // everything begins on a cache line of its own

std::size_t aligned(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

c10::StorageImpl* impl_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

/// A pointer into memory that lives as long as it.
at::DataPtr pointer_into(const std::shared_ptr<void>& memory, std::size_t offset) {
  auto* keeper = new std::shared_ptr<void>(memory);
  const auto release = [](void* context) { delete static_cast<std::shared_ptr<void>*>(context); };
  return {static_cast<char*>(memory.get()) + offset, keeper, release, at::kCPU};
}

at::TensorOptions state_options(const at::Tensor& parameter) {
  return at::TensorOptions().dtype(state_dtype(parameter.scalar_type())).device(parameter.device());
}

}  // namespace

ParameterHome::ParameterHome(std::shared_ptr<ddp::GradientSource> source, std::size_t num_states, std::size_t num_sums,
                             bool shared, const Shards* shards)
    : source_(std::move(source)), parameters_(source_->parameters()), shards_(shards) {
  for (const Parameter& parameter : parameters_) check(parameter);
  first_sum_.push_back(0);
  for (const Parameter& parameter : parameters_)
    first_sum_.push_back(first_sum_.back() +
                         (static_cast<std::size_t>(parameter.tensor.numel()) + kSumElements - 1) / kSumElements);
  if (shared) {
    check_storages();
    std::size_t bytes = place_storages() + aligned(num_sums * first_sum_.back() * sizeof(double));
    for (std::size_t part = 0; part < parameters_.size(); ++part) bytes += num_states * state_bytes(part);
    move_in(bytes);
  }
  find_siblings();
  make_states(num_states);
  make_sums(num_sums);
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    seen_.push_back({tensor.const_data_ptr(), tensor.scalar_type(), tensor.strides().vec(), tensor._version()});
  }
}

ParameterHome::~ParameterHome() {
  if (!shared()) return;
  try {
    for (Storage& one : storages_) {
      at::DataPtr own = c10::GetCPUAllocator()->allocate(one.storage.nbytes());
      std::memcpy(own.get(), one.storage.data(), one.storage.nbytes());
      one.storage.set_data_ptr_noswap(std::move(own));
    }
  } catch (const std::exception&) {
    // No memory for them: they stay where they are, which is right as long as nobody writes.
  }
}

void ParameterHome::check(const Parameter& parameter) const {
  const at::Tensor& tensor = parameter.tensor;
  const std::string start = "lockstep::optim: parameter " + parameter.name + " ";
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf: break;
    default:
      throw UsageError(start + "is of " + std::string(c10::toString(tensor.scalar_type())) +
                       "; allowed are float, double, bfloat16 and half");
  }
  if (!tensor.is_non_overlapping_and_dense())
    throw UsageError(start + "has holes in its memory, or elements in the same place", "use its contiguous()");
}

/// Ranks may differ in what else lies in a storage, and only parameters are meant to be shared.
void ParameterHome::check_storages() const {
  std::map<c10::StorageImpl*, std::size_t> used;
  for (const Parameter& parameter : parameters_) used[impl_of(parameter.tensor)] += parameter.tensor.nbytes();
  for (const Parameter& parameter : parameters_)
    if (used[impl_of(parameter.tensor)] < parameter.tensor.storage().nbytes())
      throw UsageError("lockstep::optim: parameter " + parameter.name + " is a part of a tensor of " +
                           std::to_string(parameter.tensor.storage().nbytes()) +
                           " bytes whose rest is no parameter; only parameters can be shared by the ranks of a host",
                       "give it memory of its own: clone() it before it is registered");
}

void ParameterHome::find_siblings() {
  std::map<c10::StorageImpl*, std::vector<std::size_t>> of_storage;
  for (std::size_t i = 0; i < parameters_.size(); ++i) of_storage[impl_of(parameters_[i].tensor)].push_back(i);
  for (const Parameter& parameter : parameters_) siblings_.push_back(of_storage[impl_of(parameter.tensor)]);
}

std::size_t ParameterHome::place_storages() {
  std::size_t end = 0;
  for (const Parameter& parameter : parameters_) {
    const auto same = [&](const Storage& one) {
      return one.storage.unsafeGetStorageImpl() == impl_of(parameter.tensor);
    };
    if (std::any_of(storages_.begin(), storages_.end(), same)) continue;
    storages_.push_back({parameter.tensor.storage(), end});
    end += aligned(parameter.tensor.storage().nbytes());
  }
  return used_ = end;
}

void ParameterHome::move_in(std::size_t bytes) {
  memory_ = source_->make_common(bytes);
  if (memory_.first)
    for (const Storage& one : storages_)
      std::memcpy(static_cast<char*>(memory_.data.get()) + one.offset, one.storage.data(), one.storage.nbytes());
  source_->sharers().barrier({.name = "parameters of an optimizer"});
  for (Storage& one : storages_) one.storage.set_data_ptr_noswap(pointer_into(memory_.data, one.offset));
}

std::size_t ParameterHome::state_bytes(std::size_t part) const {
  return aligned(own(part).count * c10::elementSize(state_dtype(parameters_[part].tensor.scalar_type())));
}

void ParameterHome::make_states(std::size_t num_states) {
  for (std::size_t part = 0; part < parameters_.size(); ++part) {
    const at::Tensor& tensor = parameters_[part].tensor;
    const auto options = state_options(tensor);
    const std::vector<std::int64_t> sizes =
        shards_ ? std::vector{static_cast<std::int64_t>(own(part).count)} : tensor.sizes().vec();
    const std::vector<std::int64_t> strides = shards_ ? std::vector{std::int64_t{1}} : tensor.strides().vec();
    std::vector<at::Tensor> states;
    for (std::size_t i = 0; i < num_states; ++i) {
      if (!shared()) {
        states.push_back(at::empty_strided(sizes, strides, options).zero_());
        continue;
      }
      void* data = static_cast<char*>(memory_.data.get()) + used_;
      used_ += state_bytes(part);
      states.push_back(at::from_blob(data, sizes, strides, [memory = memory_.data](void*) {}, options));
    }
    states_.push_back(std::move(states));
  }
}

void ParameterHome::keep(std::size_t part, std::size_t i, const at::Tensor& whole) {
  at::Tensor& state = states_[part][i];
  if (!shards_) {
    state.copy_(whole);
    return;
  }
  const at::Tensor& like = parameters_[part].tensor;
  const at::Tensor as_it_lies = at::empty_strided(like.sizes(), like.strides(), whole.options()).copy_(whole);
  const Range range = own(part);
  state.copy_(
      as_it_lies.as_strided({static_cast<std::int64_t>(range.count)}, {1}, static_cast<std::int64_t>(range.first)));
}

void ParameterHome::make_sums(std::size_t num_sums) {
  num_kinds_ = num_sums;
  if (shared()) {
    sums_ = reinterpret_cast<double*>(static_cast<char*>(memory_.data.get()) + used_);
  } else {
    own_sums_.resize(num_sums * first_sum_.back());
    sums_ = own_sums_.data();
  }
}

void ParameterHome::require_untouched() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const std::string& name = parameters_[i].name;
    const Seen& seen = seen_[i];
    if (tensor.scalar_type() != seen.dtype || tensor.strides() != at::IntArrayRef(seen.strides) ||
        (shared() && tensor.const_data_ptr() != seen.data))
      throw UsageError(
          "lockstep::optim: parameter " + name + " has got another dtype, shape or place since its optimizer was made",
          "make the optimizer after the last to() of the module");
    if (shared() && tensor._version() != seen.version)
      throw UsageError("lockstep::optim: parameter " + name +
                           " was changed outside step(); the ranks of this host have one copy of it, so that "
                           "each rank's change was made to all",
                       "make the change in change_parameters() of the optimizer, or before the optimizer is made");
  }
}

void ParameterHome::require_own_storages() const {
  for (const std::vector<std::size_t>& together : siblings_)
    if (together.size() > 1)
      throw UsageError("update_in_backward(): parameters " + parameters_[together[0]].name + " and " +
                           parameters_[together[1]].name +
                           " are in one storage, so that one would be updated while a graph may need the other",
                       "do without update_in_backward(), or give them memory of their own");
}

void ParameterHome::note_update(std::size_t part) {
  torch::autograd::impl::bump_version(parameters_[part].tensor);
  if (!shared()) return;  // nobody asks which version was the last
  for (const std::size_t other : siblings_[part]) seen_[other].version = parameters_[other].tensor._version();
}

void ParameterHome::note_changes() {
  if (!shared()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) seen_[i].version = parameters_[i].tensor._version();
}

}  // namespace lockstep::optim
