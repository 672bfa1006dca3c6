#include "lockstep/ddp/hooks/bf16_compress_hook.h"

#include <ATen/ops/empty_like.h>

namespace lockstep::ddp::inline hooks {

void Bf16CompressHook::buckets_changed(const std::vector<comm::Bucket>& buckets) {
  sent_.clear();
  for (const comm::Bucket& bucket : buckets)
    sent_.push_back(bucket.buffer.element_size() > 2
                        ? at::empty_like(bucket.buffer, bucket.buffer.options().dtype(at::kBFloat16))
                        : bucket.buffer);
}

comm::PendingPtr Bf16CompressHook::start(comm::Bucket& bucket, comm::HookContext& context) {
  const at::Tensor& sent = sent_[bucket.index];
  if (!sent.is_same(bucket.buffer)) sent.copy_(bucket.buffer);
  return context.all_reduce(sent);
}

void Bf16CompressHook::finish(comm::Bucket& bucket, comm::HookContext& /*context*/) {
  const at::Tensor& sum = sent_[bucket.index];
  if (!sum.is_same(bucket.buffer)) bucket.buffer.copy_(sum);
}

}  // namespace lockstep::ddp::inline hooks
