// Int8Hook: sends gradients as int8, with error feedback.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::ddp::inline hooks {

/// Sends gradients as int8 with a float32 scale for 256 of them, in every reduction: a quarter of the bytes of float32.
/// What rounding loses is added to the next gradient (error feedback; Seide and others, 2014; Karimireddy and others,
/// 2019, https://arxiv.org/abs/1901.09847). Gradients of other dtypes are converted to float32.
///
/// With the transport hierarchy, each host's sum is rounded, and the sum over the hosts once more; nothing is rounded
/// inside a host, or in a bucket of at most 4 KiB. With tcp and mpi, every rank sends its rounded gradients to every
/// other, which is less than float32 for up to 7 ranks. All ranks hold the same bits, on CPUs of any kind. On a GPU,
/// start() waits for the gradients, and the CPU rounds.
///
/// A reduction with an infinity or a NaN gives NaNs in some of the 256 numbers around it, and what was carried over is
/// dropped, so a loss scaler can skip the step. What was carried over has the scale of the gradients: when a scaler
/// raises its scale, that counts half once. It is also dropped when gradients are assigned to other buckets.
/// Clip gradients after the reduction.
///
/// The state belongs to the rank: TrainingState::add_each_rank(). It is restored on the same ranks of the same hosts,
/// for the same buckets (DdpOptions.bucket_layout); otherwise it begins anew. It takes 6 bytes for each element with 2
/// hosts of one rank, and less with more.
class Int8Hook final : public comm::GradientHook, public checkpoint::Stateful {
 public:
  std::string name() const override { return "int8"; }
  void buckets_changed(const std::vector<comm::Bucket>& buckets) override;
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override;
  void finish(comm::Bucket& bucket, comm::HookContext& context) override;

  checkpoint::StateDict state_dict() const override;
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  struct BucketState {
    std::string names;  // of its gradients
    std::shared_ptr<comm::ErrorFeedback> feedback;
    at::Tensor sums;              // float32: the bucket's own buffer if it has that dtype
    at::Tensor codes, all_codes;  // of this rank and of all ranks; undefined if the transport rounds
  };
  void adopt_loaded(const BucketState& bucket) const;
  comm::PendingPtr gather(BucketState& state, comm::HookContext& context) const;

  std::vector<BucketState> buckets_;
  std::size_t num_finished_ = 0;                       // buckets of the reduction in progress
  bool is_finite_ = true;                              // all of these
  std::int64_t rank_ = -1, size_ = -1;                 // of the group; of loaded state, of the group that has saved it
  std::map<std::string, comm::ErrorFeedback> loaded_;  // by the names of a bucket
  bool is_loaded_ = false;                             // and not used yet
};

}  // namespace lockstep::ddp::inline hooks
