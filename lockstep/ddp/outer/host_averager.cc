// Flattens tensors into buckets, which are exchanged and copied back.
#include "lockstep/ddp/outer/host_averager.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace lockstep::ddp::inline outer {
namespace {

constexpr std::size_t kBucketBytes = 25 << 20;

}  // namespace

HostAverager::HostAverager(int period, Exchange exchange, Store store)
    : period_(period), exchange_(std::move(exchange)), store_(std::move(store)) {}

void HostAverager::average(const std::vector<at::Tensor>& tensors, bool equal_on_host) {
  num_reductions_ = 0;
  if (!exchange_) return;
  const at::NoGradGuard no_grad;
  struct Bucket {
    std::vector<at::Tensor> tensors;
    std::size_t bytes = 0;
  };
  std::vector<Bucket> buckets;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_floating_point()) continue;
    const auto bucket = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket& open) {
      const at::Tensor& other = open.tensors.front();
      return other.scalar_type() == tensor.scalar_type() && other.device() == tensor.device() &&
             open.bytes + tensor.nbytes() <= kBucketBytes;
    });
    Bucket& into = bucket != buckets.end() ? *bucket : buckets.emplace_back();
    into.tensors.push_back(tensor);
    into.bytes += tensor.nbytes();
  }
  for (const Bucket& bucket : buckets) average_bucket(bucket.tensors, equal_on_host);
}

void HostAverager::average_bucket(const std::vector<at::Tensor>& tensors, bool equal_on_host) const {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}));
  const at::Tensor flat = at::cat(parts);
  exchange_(flat, equal_on_host);
  std::int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    store_(flat.narrow(0, first, tensor.numel()).view(tensor.sizes()), tensor);
    first += tensor.numel();
  }
}

HostLink::HostLink(const comm::Group& group) : group_(group.split(0)) {
  has_several_hosts_ = any(group.split_by_host().size() < group.size(), "has several hosts");
}

HostAverager::Exchange HostLink::exchange(at::ScalarType wire_dtype) const {
  if (!has_several_hosts_) return nullptr;
  return [group = group_, wire_dtype](const at::Tensor& flat, bool) {
    group.all_reduce(
        flat, comm::ReduceOp::kMean,
        {.name = "average_hosts", .wire_dtype = flat.scalar_type() == at::kFloat ? wire_dtype : at::kFloat});
  };
}

bool HostLink::any(bool value, const char* name) const {
  const at::Tensor flag = at::full({1}, value, at::kByte);
  group_.all_reduce(flag, comm::ReduceOp::kMax, {.name = name});
  return flag.item<std::uint8_t>() != 0;
}

}  // namespace lockstep::ddp::inline outer
