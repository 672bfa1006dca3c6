#include "lockstep/ddp/buffer_sync.h"

#include <ATen/ATen.h>

namespace lockstep::ddp {
namespace {

at::Tensor bytes_view(const at::Tensor& contiguous) { return contiguous.flatten().view(at::kByte); }

}  // namespace

BufferSync::BufferSync(NamedTensors buffers, Buffers mode) {
  if (mode == Buffers::kLocal) return;
  std::int64_t total = 0;
  for (auto& buffer : buffers) {
    const bool average = mode == Buffers::kMean && buffer.second.is_floating_point();
    if (!average) total += static_cast<std::int64_t>(buffer.second.nbytes());
    (average ? averaged_ : exact_).push_back(std::move(buffer));
  }
  if (total > 0) bytes_ = at::empty({total}, exact_.front().second.options().dtype(at::kByte).requires_grad(false));
}

std::vector<comm::Collective> BufferSync::pack() {
  std::vector<comm::Collective> along;
  const at::NoGradGuard no_grad;
  if (bytes_.defined()) {
    std::int64_t at = 0;
    for (const auto& [name, buffer] : exact_) {
      const at::Tensor source = bytes_view(buffer.contiguous());
      bytes_.narrow(0, at, source.numel()).copy_(source);
      at += source.numel();
    }
    along.push_back({.kind = comm::Kind::kBroadcast, .name = "buffers", .input = bytes_, .output = bytes_});
  }
  sums_.clear();
  for (const auto& [name, buffer] : averaged_) {
    sums_.push_back(buffer.clone(at::MemoryFormat::Contiguous));
    along.push_back({.kind = comm::Kind::kAllReduce, .name = name, .input = sums_.back(), .output = sums_.back()});
  }
  return along;
}

void BufferSync::unpack(int world_size) {
  const at::NoGradGuard no_grad;
  std::int64_t at = 0;
  for (const auto& [name, buffer] : exact_) {
    const auto size = static_cast<std::int64_t>(buffer.nbytes());
    // A copy of its own: a part of bytes_ need not be aligned for the buffer's dtype.
    buffer.data().copy_(bytes_.narrow(0, at, size).clone().view(buffer.scalar_type()).view(buffer.sizes()));
    at += size;
  }
  for (std::size_t i = 0; i < averaged_.size(); ++i) averaged_[i].second.data().copy_(sums_[i].div_(world_size));
}

}  // namespace lockstep::ddp
