// Local SGD between hosts: flattens parameters into buckets and all-reduces them.
#include "lockstep/ddp/host_averager.h"

#include <ATen/ATen.h>

namespace lockstep::ddp {
namespace {

constexpr std::size_t kBucketBytes = 25 << 20;

}  // namespace

HostAverager::HostAverager(const comm::Group& group, const NamedTensors& tensors, int period, at::ScalarType wire_dtype,
                           MemoryOf memory_of)
    : group_(group.split(0)), period_(period), wire_dtype_(wire_dtype), memory_of_(std::move(memory_of)) {
  const at::Tensor hosts = at::full({1}, group.split_by_host().size() < group.size(), at::kInt);
  group_.all_reduce(hosts, comm::ReduceOp::kMax);
  has_several_hosts_ = hosts.item<int>() != 0;
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_floating_point()) continue;
    const bool fits = !buckets_.empty() && buckets_.back().front().scalar_type() == tensor.scalar_type() &&
                      bytes + tensor.nbytes() <= kBucketBytes;
    if (!fits) {
      buckets_.emplace_back();
      bytes = 0;
    }
    // A write to a parameter bumps its version counter, so that a pending graph fails; a write to a buffer does not
    // (see BufferSync).
    buckets_.back().push_back(tensor.requires_grad() ? tensor.detach() : tensor.data());
    bytes += tensor.nbytes();
  }
}

bool HostAverager::average_if_due(bool& stop_requested) {
  if (++num_reductions_ % period_ != 0) return false;
  average();
  if (has_several_hosts_) {
    const at::Tensor any = at::full({1}, stop_requested, at::kByte);
    group_.all_reduce(any, comm::ReduceOp::kMax, {.name = "stop requested"});
    stop_requested = any.item<std::uint8_t>() != 0;
  }
  return true;
}

void HostAverager::average() {
  if (!has_several_hosts_) return;
  const at::NoGradGuard no_grad;
  for (const auto& bucket : buckets_) average_bucket(bucket);
}

void HostAverager::average_bucket(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const at::Tensor bucket = at::cat(flat);
  group_.all_reduce(
      bucket, comm::ReduceOp::kMean,
      {.name = "average_hosts", .wire_dtype = bucket.scalar_type() == at::kFloat ? wire_dtype_ : at::kFloat});
  std::int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor& memory = memory_of_(tensor);
    copy_values(bucket.narrow(0, first, tensor.numel()).view(tensor.sizes()), memory);
    if (!memory.is_same(tensor)) tensor.unsafeGetTensorImpl()->bump_version();
    first += tensor.numel();
  }
}

}  // namespace lockstep::ddp
