// PowerSgdHook: sends the factors of a low-rank approximation instead of a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::ddp::inline hooks {

struct PowerSgdOptions {
  int rank = 4;          ///< of the approximation, 1 to 8
  int dense_steps = 10;  ///< so many reductions at the start send gradients as they are
};

/// PowerSGD (Vogels, Karimireddy, Jaggi, 2019, https://arxiv.org/abs/1905.13727), in the alternating form of its
/// authors' library: of the factors P and Q of a gradient, seen as a matrix of its first dimension by the rest, each
/// reduction sends one, computed from the other, which has been made orthonormal. A reduction so costs one all_reduce
/// for each bucket, of 1 to 2 % of the bytes with rank 4.
///
/// What the approximation of a rank's own gradient lacks is added to its next one (error feedback, local). Gradients of
/// less than two dimensions, and those that would become less than twice as small, are not approximated. All that is
/// sent is float32, also of gradients of another dtype. All ranks hold the same bits, on CPUs of any kind; on GPUs, if
/// they are of one kind. On a GPU, start() waits for the gradients.
///
/// A reduction with an infinity or a NaN gives NaNs in the buckets that have one, and changes no state, so a loss
/// scaler can skip the step. What was carried over has the scale of the gradients: when a scaler changes its scale,
/// that counts twice or half once. A gradient that no rank has in a step loses a part of what was carried over. Clip
/// gradients after the reduction.
///
/// The state belongs to the rank: TrainingState::add_each_rank(). With another number of ranks, a rank that is new has
/// carried nothing over. It takes 4 bytes for each element that it approximates, and during a reduction 12.
class PowerSgdHook final : public comm::GradientHook, public checkpoint::Stateful {
 public:
  /// Throws UsageError for options out of range.
  explicit PowerSgdHook(PowerSgdOptions options = {});

  std::string name() const override;
  void buckets_changed(const std::vector<comm::Bucket>& buckets) override;
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override;
  void finish(comm::Bucket& bucket, comm::HookContext& context) override;

  checkpoint::StateDict state_dict() const override;
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  /// Of a gradient that is approximated. P [rows, rank] and Q [columns, rank] are equal on all ranks.
  struct Matrix {
    std::int64_t rows = 0, columns = 0;
    std::int64_t steps = 0;  // reductions
    at::Tensor p, q;         // float32 on the CPU
    at::Tensor error;        // [rows, columns], float32 on the gradient's device; undefined before the first
    at::Tensor next_p{}, next_q{}, next_error{};  // of the reduction in progress
    bool is_loaded = false;
  };
  /// One gradient of a bucket. What is sent of it begins at `offset`.
  struct Part {
    Matrix* matrix = nullptr;  // null: sent as it is
    std::int64_t offset = 0, count = 0;
  };
  struct BucketState {
    std::vector<Part> parts;
    at::Tensor sent;                 // float32, of the bucket's device; after the all_reduce, the sums
    std::vector<at::Tensor> values;  // by part: the gradient with the error, [rows, columns]
    std::vector<at::Tensor> own;     // by part: what this rank has sent
    std::vector<at::Tensor> basis;   // by part: the orthonormal factor
  };

  bool is_dense(const Matrix& matrix) const { return matrix.steps < options_.dense_steps; }
  static bool sends_q(const Matrix& matrix) { return matrix.steps % 2 == 0; }
  void plan(const comm::Bucket& bucket, BucketState& state);
  void adopt_loaded(const comm::HookContext& context);
  void end_reduction();
  void finish_matrix(Matrix& matrix, const at::Tensor& gradient, const at::Tensor& sum, std::size_t index,
                     BucketState& state);

  const PowerSgdOptions options_;
  std::map<std::string, Matrix> matrices_;  // by the parameter's name
  std::vector<BucketState> buckets_;
  std::vector<std::string> reduced_;    // names of the gradients of the buckets that are finished
  std::size_t num_finished_ = 0;        // buckets of the reduction in progress
  bool is_finite_ = true;               // all of these
  std::int64_t rank_ = -1, size_ = -1;  // of the group; of loaded state, of the group that has saved it
  bool is_loaded_ = false;              // and not used yet
};

}  // namespace lockstep::ddp::inline hooks
