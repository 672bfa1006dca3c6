// Updates parameters and optimizer state in the same pass that reads all ranks' gradients.
#pragma once

#include <c10/util/SmallVector.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/unscaling.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/foreach_pass.h"
#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/fused/state_sharding.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::comm::inline interface {
class CapturedStep;
}

namespace lockstep::optim::inline fused {

/// The implementation of FusedOptimizer (fused_optimizer.h), whose functions have the same contracts. Where ranks can
/// access each other's memory, they share one copy of parameters and state, and each chunk is updated by the rank that
/// claims it first. Elsewhere each rank updates its own copy from gradients that backward() has averaged.
class FusedUpdate : public std::enable_shared_from_this<FusedUpdate>,
                    private comm::ChunkSink,
                    private ddp::BackwardUpdater {
 public:
  bool shares_parameters() const { return storage_.is_shared(); }
  /// Calls `closure`, if there is one, with gradients enabled, and makes the update. Returns what the closure returned.
  at::Tensor step(const std::function<at::Tensor()>& closure);
  void average_gradients();
  at::Tensor clip_grad_norm(double max_norm);
  void clip_grad_value(double max);
  void change_parameters(const std::function<void()>& change);
  void update_in_backward(bool on);
  amp::UnscaleResult unscale(const at::Tensor& inverse_scale);
  bool step_unless_found_inf(const at::Tensor& found_inf);
  void end_step();
  void skip_step();
  /// Makes torch's step counts exact before they are saved. Blocks until the device is done.
  void sync_step_counts();
  /// Copies the state that torch has read from an archive into the memory of the update. Throws UsageError for state of
  /// another shape.
  void import_loaded_state();
  checkpoint::StateDict state_dict();
  void load_state_dict(const checkpoint::StateDict& state);

 protected:
  /// `rule` must outlive this object. A collective of all ranks.
  FusedUpdate(std::shared_ptr<ddp::GradientSource> source, UpdateRule& rule, const FusedOptions& options);

  /// The kernel's arguments for the elements [first, end) of a chunk that are in this owner's shard, and the arrays
  /// that these point to; no elements if there are none. In a pass that sums the squares of gradients that are means
  /// everywhere, or this rank's own, for all of [first, end), and without states.
  struct RangeArgs {
    RangeArgs(const FusedUpdate& update, const comm::GradientChunk& chunk, std::size_t first, std::size_t end);
    RangeArgs(const RangeArgs&) = delete;
    RangeArgs& operator=(const RangeArgs&) = delete;

    c10::SmallVector<const void*, 16> gradients;
    c10::SmallVector<void*, 4> states;
    kernels::KernelArgs kernel{};
  };
  /// Whether the running pass computes norms, by measure(), and updates nothing.
  bool is_measuring() const { return gradient_use_ == comm::GradientUse::kNorm; }
  void measure(const comm::GradientChunk& chunk);
  /// Whether gradients are means only in the shards.
  bool has_partial_means() const { return shards_ && source_->has_local_gradients(); }

 private:
  struct OptimizerAttachment {
    OptimizerAttachment(ddp::GradientSource& from, comm::ChunkSink* sink)
        : source(from), can_run_pass(from.attach_optimizer(sink)) {}
    ~OptimizerAttachment() { source.detach_optimizer(); }
    ddp::GradientSource& source;
    const bool can_run_pass;
  };

  void finish_gradient(std::size_t index) override;
  std::uint64_t begin_update() override;
  void end_update(bool consumed_chunks) override;
  std::uint64_t prepare();
  double sum_squared_gradients();
  double gradient_scale() const;
  void check_not_scaled_twice();
  void step_captured(comm::CapturedStep& step);
  void write_lr(std::uint64_t constants);
  void require_clippable(const std::string& call) const;
  void measure_norms(std::uint64_t options_hash);
  void initialize_state(std::size_t index);
  void run_norm_pass(bool measures_norms, std::uint64_t options_hash);
  void update_all(std::uint64_t options_hash);
  void run_local_pass();

  const std::shared_ptr<ddp::GradientSource> source_;
  UpdateRule& rule_;
  const bool foreach_;
  const OptimizerAttachment attachment_;
  const std::unique_ptr<StateSharding> shards_;  // null: state is not sharded
  ParameterStorage storage_;
  std::optional<ForeachPass> foreach_pass_;                      // if foreach_
  at::Tensor found_inf_;                                         // of the running step; undefined: the update is made
  comm::GradientUse gradient_use_ = comm::GradientUse::kUpdate;  // of the running pass
  std::vector<bool> has_sums_;                                   // parameters whose squares the last pass has summed
  bool measuring_norms_ = false;                                 // the pass sums what rule_.measure_norms() returns
  struct Clip {
    double factor = 1;                                     // multiplies gradients
    double max = std::numeric_limits<double>::infinity();  // values are then clamped to [-max, max]
    std::uint64_t backward = 0;                            // number of the backward() that it applies to
    bool requested = false;                                // clipping was requested since the last step()
  } clip_;
  struct Unscaling {
    double inverse;
    std::uint64_t backward;  // number of the backward() that it applies to
    double squared_norm;     // sum of squares of the scaled gradients
  };
  std::optional<Unscaling> unscaling_;  // of local gradients; applied in the next step()
  bool updates_in_backward_ = false;
  bool updated_in_backward_ = false;  // a backward() has updated since the last step()
  std::uint64_t options_hash_ = 0;    // of that update, from prepare()
};

/// The FusedUpdate of one optimizer. `Rule` is the final class of its rule, so a chunk reaches the kernel without a
/// virtual call.
template <typename Rule>
class FusedUpdateOf final : public FusedUpdate {
 public:
  FusedUpdateOf(std::shared_ptr<ddp::GradientSource> source, Rule& rule, const FusedOptions& options)
      : FusedUpdate(std::move(source), rule, options), rule_(rule) {}

 private:
  void consume(const comm::GradientChunk& chunk) override {
    if (is_measuring()) return measure(chunk);
    const RangeArgs range(*this, chunk, chunk.offset, chunk.offset + chunk.count);
    if (range.kernel.count > 0) rule_.kernel()(range.kernel, rule_.scalars(chunk.gradient_index));
  }

  const Rule& rule_;
};

template <typename Rule>
void FusedOptimizer::initialize(std::shared_ptr<ddp::GradientSource> gradients, std::unique_ptr<Rule> rule,
                                const FusedOptions& options) {
  update_ = base::make_process_owned<FusedUpdateOf<Rule>>(std::move(gradients), *rule, options);
  rule_ = std::move(rule);
}

template <typename TorchOptimizer, typename Options>
at::Tensor FusedOptimizerOf<TorchOptimizer, Options>::step(std::function<at::Tensor()> closure) {
  return update_->step(closure);
}

template <typename TorchOptimizer, typename Options>
void FusedOptimizerOf<TorchOptimizer, Options>::save(torch::serialize::OutputArchive& archive) const {
  update_->sync_step_counts();
  TorchOptimizer::save(archive);
}

template <typename TorchOptimizer, typename Options>
void FusedOptimizerOf<TorchOptimizer, Options>::load(torch::serialize::InputArchive& archive) {
  TorchOptimizer::load(archive);
  update_->import_loaded_state();
}

}  // namespace lockstep::optim::inline fused
