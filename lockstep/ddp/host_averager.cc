#include "lockstep/ddp/host_averager.h"

#include <ATen/ATen.h>

namespace lockstep::ddp {
namespace {

constexpr std::size_t kPackBytes = 25 << 20;

}  // namespace

HostSync::HostSync(comm::Group& group, const NamedTensors& tensors, int every, at::ScalarType wire)
    : group_(group.split(0)), every_(every), wire_(wire) {
  const at::Tensor hosts = at::full({1}, group.split_by_host().size() < group.size(), at::kInt);
  group_.all_reduce(hosts, comm::ReduceOp::kMax);
  several_hosts_ = hosts.item<int>() != 0;
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_floating_point()) continue;
    const bool fits = !packs_.empty() && packs_.back().front().scalar_type() == tensor.scalar_type() &&
                      bytes + tensor.nbytes() <= kPackBytes;
    if (!fits) {
      packs_.emplace_back();
      bytes = 0;
    }
    // A write to a parameter is seen by a graph that still needs it, one to a buffer is not (BufferSync).
    packs_.back().push_back(tensor.requires_grad() ? tensor.detach() : tensor.data());
    bytes += tensor.nbytes();
  }
}

bool HostSync::exchanged(bool& wish) {
  if (++exchanges_ % every_ != 0) return false;
  average();
  if (several_hosts_) {
    const at::Tensor any = at::full({1}, wish, at::kByte);
    group_.all_reduce(any, comm::ReduceOp::kMax, {.name = "stop requested"});
    wish = any.item<std::uint8_t>() != 0;
  }
  return true;
}

void HostSync::average() {
  if (!several_hosts_) return;
  const at::NoGradGuard no_grad;
  for (const auto& pack : packs_) average_together(pack);
}

void HostSync::average_together(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const at::Tensor pack = at::cat(flat);
  group_.all_reduce(pack, comm::ReduceOp::kMean,
                    {.name = "host_sync", .wire = pack.scalar_type() == at::kFloat ? wire_ : at::kFloat});
  std::int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(pack.narrow(0, first, tensor.numel()).view(tensor.sizes()));
    first += tensor.numel();
  }
}

}  // namespace lockstep::ddp
