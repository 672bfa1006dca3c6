// Gathers parameters, norms and state from their owners in rounds of at most 1 MiB per owner.
#include "lockstep/optim/fused/state_sharding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::inline fused {
namespace {

constexpr std::size_t kMaxChunkBytes = std::size_t{1} << 20;
constexpr std::size_t kHeaderBytes = sizeof(std::uint64_t);
const char* const kOperationName = "parameters of an optimizer";

std::size_t element_bytes(const at::Tensor& tensor) { return c10::elementSize(tensor.scalar_type()); }

std::vector<StateSize> state_sizes(const std::vector<ddp::GradientSource::Parameter>& parameters) {
  std::vector<StateSize> sizes;
  for (const auto& [name, tensor] : parameters)
    sizes.push_back(
        {static_cast<std::size_t>(tensor.numel()), c10::elementSize(kernels::state_dtype(tensor.scalar_type()))});
  return sizes;
}

}  // namespace

std::vector<ElementRange> plan_shard(const std::vector<StateSize>& parameters, int owner, int num_owners) {
  const auto owners = static_cast<std::size_t>(num_owners), self = static_cast<std::size_t>(owner);
  std::vector<ElementRange> ranges;
  for (const StateSize& parameter : parameters) {
    const std::size_t line = std::max<std::size_t>(1, kCacheLineBytes / parameter.bytes_each);
    const std::size_t lines = parameter.elements / line;
    // lines * k / owners could overflow. The last interval ends with the parameter.
    const auto cut = [&](std::size_t k) {
      return k == owners ? parameter.elements : (lines / owners * k + lines % owners * k / owners) * line;
    };
    ranges.push_back({cut(self), cut(self + 1) - cut(self)});
  }
  return ranges;
}

StateSharding::StateSharding(ddp::GradientSource& source)
    : source_(source), parameters_(source.parameters()), owners_(source.shard_owners()) {
  std::size_t most = 0;
  for (int owner = 0; owner < owners_.count; ++owner) {
    ranges_.push_back(plan_shard(state_sizes(parameters_), owner, owners_.count));
    std::vector<std::size_t>& ends = ends_.emplace_back();
    std::size_t end = 0;
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      ends.push_back(end += ranges_.back()[index].count * element_bytes(parameters_[index].tensor));
    most = std::max(most, end);
  }
  if (!is_sharded() || !owners_.group) return;
  if (!parameters_.empty()) device_ = parameters_.front().tensor.device();
  for (const auto& [name, tensor] : parameters_)
    if (tensor.device() != device_)
      throw base::UsageError("shard_state: parameter " + name + " is on " + tensor.device().str() +
                             "; expected the device of the first parameter, " + device_.str());
  rounds_ = std::max<std::size_t>(1, (most + kMaxChunkBytes - 1) / kMaxChunkBytes);
  chunk_bytes_ = (most + rounds_ - 1) / rounds_;
  const auto size = static_cast<std::int64_t>(kHeaderBytes + chunk_bytes_);
  const auto bytes = at::dtype(at::kByte).device(device_);
  input_ = at::empty({size}, bytes);
  output_ = at::empty({owners_.count, size}, bytes);
}

/// Calls copy(address, bytes, place) for each contiguous segment of the bytes [begin, begin + size) of the owner's
/// elements. `place` is the segment's offset from `begin`.
template <typename Copy>
void StateSharding::for_each_segment(const ParameterStorage& storage, std::size_t owner, std::size_t begin,
                                     std::size_t size, const Copy& copy) const {
  const std::vector<std::size_t>& ends = ends_[owner];
  const std::size_t end = std::min(begin + size, ends.empty() ? 0 : ends.back());
  auto index = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
  for (std::size_t at = begin; at < end; ++index) {
    const std::size_t start = index == 0 ? 0 : ends[index - 1], stop = std::min(ends[index], end);
    if (stop <= at) continue;
    char* data = storage.memory_of(index) + ranges_[owner][index].first * element_bytes(parameters_[index].tensor) +
                 (at - start);
    copy(data, stop - at, at - begin);
    at = stop;
  }
}

/// Compares the hashes at the beginning of each row of `gathered`.
void StateSharding::check_fingerprints(std::uint64_t options_hash, const at::Tensor& gathered) const {
  for (int owner = 0; owner < owners_.count; ++owner) {
    std::uint64_t other = 0;
    std::memcpy(&other, gathered[owner].const_data_ptr(), kHeaderBytes);
    if (other != options_hash) fail_on_mismatch(owner);
  }
}

/// Compares the hashes in a collective of their own, before any parameter is sent: reading a header from a device
/// tensor would block until the device is done.
void StateSharding::gather_and_check_fingerprints(std::uint64_t options_hash) const {
  at::Tensor mine = at::empty({1}, at::kLong), all = at::empty({owners_.count}, at::kLong);
  std::memcpy(mine.mutable_data_ptr(), &options_hash, kHeaderBytes);
  owners_.group->all_gather(all, mine, {.name = kOperationName});
  check_fingerprints(options_hash, all);
}

void StateSharding::copy(void* to, const void* from, std::size_t bytes) const {
  if (device_.is_cpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
  const auto tensor = [&](const void* data) {
    return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)},
                         at::dtype(at::kByte).device(device_));
  };
  tensor(to).copy_(tensor(from));
}

void StateSharding::fail_on_mismatch(int owner) const {
  const comm::Group& group = *owners_.group;
  const int self = group.global_rank(group.rank()), peer = group.global_rank(owner);
  comm::GroupAccess::fail(
      group, base::DesyncError(base::Cause::kDesync, std::string("all_gather(") + kOperationName + ")", self, peer,
                               "the optimizers of rank " + std::to_string(peer) + " and rank " + std::to_string(self) +
                                   " have different options, such as the learning rate, or have made different numbers "
                                   "of steps",
                               "set the same options, and call step() equally often, on all ranks"));
}

void StateSharding::all_gather_rounds(std::uint64_t options_hash, const ParameterStorage& storage) {
  const comm::Group& group = *owners_.group;
  const auto self = static_cast<std::size_t>(owners_.index);
  auto* mine = static_cast<char*>(input_.mutable_data_ptr());
  if (device_.is_cpu())
    std::memcpy(mine, &options_hash, kHeaderBytes);
  else
    gather_and_check_fingerprints(options_hash);
  for (std::size_t round = 0; round < rounds_; ++round) {
    for_each_segment(storage, self, round * chunk_bytes_, chunk_bytes_,
                     [&](const char* data, std::size_t bytes, std::size_t place) {
                       copy(mine + kHeaderBytes + place, data, bytes);
                     });
    group.all_gather(output_, input_, {.name = kOperationName});
    if (round == 0 && device_.is_cpu()) check_fingerprints(options_hash, output_);
    for (std::size_t owner = 0; owner < ranges_.size(); ++owner) {
      if (owner == self) continue;
      const char* theirs =
          static_cast<const char*>(output_.const_data_ptr()) + owner * (kHeaderBytes + chunk_bytes_) + kHeaderBytes;
      for_each_segment(storage, owner, round * chunk_bytes_, chunk_bytes_,
                       [&](char* data, std::size_t bytes, std::size_t place) { copy(data, theirs + place, bytes); });
    }
  }
}

void StateSharding::all_gather_parameters(std::uint64_t options_hash, const ParameterStorage& storage) {
  if (!is_sharded()) return;
  if (owners_.group) all_gather_rounds(options_hash, storage);
  if (owners_.has_several_ranks) source_.host_group().barrier({.name = kOperationName});
}

void StateSharding::all_reduce_sums(std::span<double> sums) {
  if (owners_.group) {
    const at::Tensor all = at::from_blob(sums.data(), {static_cast<std::int64_t>(sums.size())}, at::kDouble);
    owners_.group->all_reduce(all, comm::ReduceOp::kSum, {.name = "norms of an optimizer"});
  }
  if (owners_.has_several_ranks) source_.host_group().barrier({.name = "norms of an optimizer"});
}

at::Tensor StateSharding::gather_state(std::size_t index, const at::Tensor& shard) {
  const at::Tensor& like = parameters_[index].tensor;
  const at::Tensor whole = at::empty_strided(like.sizes(), like.strides(), shard.options());
  const at::Tensor flat = whole.as_strided({like.numel()}, {1});
  for (std::size_t owner = 0; owner < ranges_.size(); ++owner) {
    const ElementRange& range = ranges_[owner][index];
    if (range.count == 0) continue;
    const at::Tensor slice =
        flat.narrow(0, static_cast<std::int64_t>(range.first), static_cast<std::int64_t>(range.count));
    if (static_cast<int>(owner) == owners_.index) slice.copy_(shard);
    if (owners_.group) owners_.group->broadcast(slice, static_cast<int>(owner), {.name = "state of an optimizer"});
  }
  if (owners_.has_several_ranks && flat.numel() > 0)
    source_.host_group().broadcast(flat, 0, {.name = "state of an optimizer"});
  return whole;
}

}  // namespace lockstep::optim::inline fused
