// Bf16CompressHook: sends gradients as bfloat16.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::ddp::inline hooks {

/// Sends float32 and float64 gradients as bfloat16, like PyTorch's bf16_compress_hook: a half or a quarter of the
/// bytes, between all ranks. Gradients of bfloat16 and float16 are sent in their own dtype.
///
/// Each rank's gradient is divided by the number of ranks and rounded to bfloat16. The transport adds in bfloat16 (in
/// shared memory in float32), so it rounds once or several times more: with n ranks, the mean differs from the exact
/// one by at most n / 256 of the mean of the absolute values. The range is that of float32; larger values become
/// infinite. All ranks hold the same bits.
///
/// Allocates 2 bytes for each element that it compresses, once for each layout of the buckets.
///
/// To round between hosts only, use DdpOptions.wire_dtype instead of this hook.
class Bf16CompressHook final : public comm::GradientHook {
 public:
  std::string name() const override { return "bf16_compress"; }
  void buckets_changed(const std::vector<comm::Bucket>& buckets) override;
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override;
  void finish(comm::Bucket& bucket, comm::HookContext& context) override;

 private:
  std::vector<at::Tensor> sent_;  // by bucket; the bucket's own buffer if its elements have 2 bytes
};

}  // namespace lockstep::ddp::inline hooks
