#include "lockstep/optim/fused/state_sharding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {
namespace {

constexpr std::size_t kMostChunk = std::size_t{1} << 20;
constexpr std::size_t kHeader = sizeof(std::uint64_t);
const char* const kName = "parameters of an optimizer";

std::size_t element_bytes(const at::Tensor& tensor) { return c10::elementSize(tensor.scalar_type()); }

std::vector<StateSize> state_sizes(const std::vector<ddp::GradientSource::Parameter>& parameters) {
  std::vector<StateSize> sizes;
  for (const auto& [name, tensor] : parameters)
    sizes.push_back({static_cast<std::size_t>(tensor.numel()), c10::elementSize(state_dtype(tensor.scalar_type()))});
  return sizes;
}

}  // namespace

Shards::Shards(ddp::GradientSource& source)
    : source_(source), parameters_(source.parameters()), owners_(source.owners()) {
  std::size_t most = 0;
  for (int owner = 0; owner < owners_.count; ++owner) {
    ranges_.push_back(shard(state_sizes(parameters_), owner, owners_.count));
    std::vector<std::size_t>& ends = ends_.emplace_back();
    std::size_t end = 0;
    for (std::size_t part = 0; part < parameters_.size(); ++part)
      ends.push_back(end += ranges_.back()[part].count * element_bytes(parameters_[part].tensor));
    most = std::max(most, end);
  }
  if (!divided() || !owners_.group) return;
  if (!parameters_.empty()) device_ = parameters_.front().tensor.device();
  for (const auto& [name, tensor] : parameters_)
    if (tensor.device() != device_)
      throw base::UsageError("shard_state: parameter " + name + " is on " + tensor.device().str() +
                             "; allowed is the device of the first, " + device_.str());
  chunk_ = std::min(most, kMostChunk);
  rounds_ = chunk_ == 0 ? 1 : (most + chunk_ - 1) / chunk_;
  const auto size = static_cast<std::int64_t>(kHeader + chunk_);
  const auto bytes = at::dtype(at::kByte).device(device_);
  input_ = at::empty({size}, bytes);
  output_ = at::empty({owners_.count, size}, bytes);
}

/// Calls copy(address, bytes, place) for the bytes [begin, begin + size) of what `owner` has; the first of them has
/// place 0.
template <typename Copy>
void Shards::each_run(std::size_t owner, std::size_t begin, std::size_t size, const Copy& copy) const {
  const std::vector<std::size_t>& ends = ends_[owner];
  const std::size_t end = std::min(begin + size, ends.empty() ? 0 : ends.back());
  auto part = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
  for (std::size_t at = begin; at < end; ++part) {
    const std::size_t start = part == 0 ? 0 : ends[part - 1], stop = std::min(ends[part], end);
    if (stop <= at) continue;
    const at::Tensor& tensor = parameters_[part].tensor;
    char* data = static_cast<char*>(tensor.mutable_data_ptr()) + ranges_[owner][part].first * element_bytes(tensor) +
                 (at - start);
    copy(data, stop - at, at - begin);
    at = stop;
  }
}

void Shards::compare(std::uint64_t options) const {
  for (int owner = 0; owner < owners_.count; ++owner) {
    std::uint64_t other = 0;
    std::memcpy(&other, output_[owner].const_data_ptr(), kHeader);
    if (other != options) refuse(owner, other, options);
  }
}

/// Before anything moves; where what the parameters travel in cannot be read without waiting for the device.
void Shards::compare_apart(std::uint64_t options) const {
  at::Tensor mine = at::empty({1}, at::kLong), all = at::empty({owners_.count}, at::kLong);
  std::memcpy(mine.mutable_data_ptr(), &options, kHeader);
  comm::Group(*owners_.group).all_gather(all, mine, {.name = kName});
  for (int owner = 0; owner < owners_.count; ++owner) {
    std::uint64_t other = 0;
    std::memcpy(&other, all.const_data_ptr<std::int64_t>() + owner, kHeader);
    if (other != options) refuse(owner, other, options);
  }
}

void Shards::copy(void* to, const void* from, std::size_t bytes) const {
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

void Shards::refuse(int owner, std::uint64_t other, std::uint64_t options) const {
  comm::Group group = *owners_.group;
  const int self = group.global_rank(group.rank()), peer = group.global_rank(owner);
  std::ostringstream text;
  text << "rank " << peer << " has an optimizer whose options or steps have the fingerprint " << other << ", rank "
       << self << " one of " << options;
  group.fail(base::DesyncError(base::Cause::kDesync, std::string("all_gather(") + kName + ")", self, peer, text.str(),
                               "all ranks need the same options, and the same calls of step()"));
}

void Shards::exchange(std::uint64_t options) {
  comm::Group group = *owners_.group;
  const auto self = static_cast<std::size_t>(owners_.index);
  auto* mine = static_cast<char*>(input_.mutable_data_ptr());
  if (device_.is_cpu())
    std::memcpy(mine, &options, kHeader);
  else
    compare_apart(options);
  for (std::size_t round = 0; round < rounds_; ++round) {
    each_run(self, round * chunk_, chunk_, [&](const char* data, std::size_t bytes, std::size_t place) {
      copy(mine + kHeader + place, data, bytes);
    });
    group.all_gather(output_, input_, {.name = kName});
    if (round == 0 && device_.is_cpu()) compare(options);
    for (std::size_t owner = 0; owner < ranges_.size(); ++owner) {
      if (owner == self) continue;
      const char* theirs = static_cast<const char*>(output_.const_data_ptr()) + owner * (kHeader + chunk_) + kHeader;
      each_run(owner, round * chunk_, chunk_,
               [&](char* data, std::size_t bytes, std::size_t place) { copy(data, theirs + place, bytes); });
    }
  }
}

void Shards::share_parameters(std::uint64_t options) {
  if (!divided()) return;
  if (owners_.group) exchange(options);
  if (owners_.of_several) source_.sharers().barrier({.name = kName});
}

void Shards::add(std::span<double> sums) {
  if (owners_.group) {
    const at::Tensor all = at::from_blob(sums.data(), {static_cast<std::int64_t>(sums.size())}, at::kDouble);
    comm::Group(*owners_.group).all_reduce(all, comm::ReduceOp::kSum, {.name = "norms of an optimizer"});
  }
  if (owners_.of_several) source_.sharers().barrier({.name = "norms of an optimizer"});
}

at::Tensor Shards::gather(std::size_t part, const at::Tensor& own) {
  const at::Tensor& like = parameters_[part].tensor;
  const at::Tensor whole = at::empty_strided(like.sizes(), like.strides(), own.options());
  const at::Tensor flat = whole.as_strided({like.numel()}, {1});
  for (std::size_t owner = 0; owner < ranges_.size(); ++owner) {
    const Range& range = ranges_[owner][part];
    if (range.count == 0) continue;
    const at::Tensor piece =
        flat.narrow(0, static_cast<std::int64_t>(range.first), static_cast<std::int64_t>(range.count));
    if (static_cast<int>(owner) == owners_.index) piece.copy_(own);
    if (owners_.group)
      comm::Group(*owners_.group).broadcast(piece, static_cast<int>(owner), {.name = "state of an optimizer"});
  }
  if (owners_.of_several && flat.numel() > 0) source_.sharers().broadcast(flat, 0, {.name = "state of an optimizer"});
  return whole;
}

}  // namespace lockstep::optim
