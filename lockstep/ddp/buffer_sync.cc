// Packs buffers into one byte tensor for a broadcast, or into copies for sums, and writes the results back.
#include "lockstep/ddp/buffer_sync.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace lockstep::ddp {
namespace {

at::Tensor bytes_view(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(at::kByte);
}

}  // namespace

BufferSync::BufferSync(NamedTensors buffers, BufferMode mode) {
  if (mode == BufferMode::kLocal) return;
  std::int64_t total = 0;
  for (auto& buffer : buffers) {
    const bool average = mode == BufferMode::kMean && buffer.second.is_floating_point() &&
                         comm::name(buffer.second.scalar_type()) != "?";
    if (!average) total += static_cast<std::int64_t>(buffer.second.nbytes());
    (average ? averaged_buffers_ : broadcast_buffers_).push_back(std::move(buffer));
  }
  if (total > 0)
    bytes_ = at::empty({total}, broadcast_buffers_.front().second.options().dtype(at::kByte).requires_grad(false));
}

std::vector<comm::Collective> BufferSync::pack() {
  std::vector<comm::Collective> extra_ops;
  const at::NoGradGuard no_grad;
  if (bytes_.defined()) {
    std::int64_t at = 0;
    for (const auto& [name, buffer] : broadcast_buffers_) {
      const at::Tensor source = bytes_view(buffer);
      bytes_.narrow(0, at, source.numel()).copy_(source);
      at += source.numel();
    }
    extra_ops.push_back(
        {.kind = comm::CollectiveKind::kBroadcast, .name = "buffers", .input = bytes_, .output = bytes_});
  }
  sums_.clear();
  for (const auto& [name, buffer] : averaged_buffers_) {
    sums_.push_back(buffer.clone(at::MemoryFormat::Contiguous));
    extra_ops.push_back(
        {.kind = comm::CollectiveKind::kAllReduce, .name = name, .input = sums_.back(), .output = sums_.back()});
  }
  return extra_ops;
}

void BufferSync::replace(const at::Tensor& buffer, const at::Tensor& tensor) {
  for (NamedTensors* const list : {&broadcast_buffers_, &averaged_buffers_})
    for (auto& [name, known] : *list)
      if (known.is_same(buffer)) known = tensor;
}

void BufferSync::unpack(int world_size) {
  const at::NoGradGuard no_grad;
  std::int64_t at = 0;
  for (const auto& [name, buffer] : broadcast_buffers_) {
    const auto size = static_cast<std::int64_t>(buffer.nbytes());
    // clone(): a slice of bytes_ may be misaligned for the buffer's dtype.
    copy_values(bytes_.narrow(0, at, size).clone().view(buffer.scalar_type()).view(buffer.sizes()), buffer.data());
    at += size;
  }
  for (std::size_t i = 0; i < averaged_buffers_.size(); ++i)
    copy_values(sums_[i].div_(world_size), averaged_buffers_[i].second.data());
}

}  // namespace lockstep::ddp
