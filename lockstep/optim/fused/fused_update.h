// One pass over all ranks' gradients that updates parameters and state.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/unscaling.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/foreach_pass.h"
#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/fused/state_sharding.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::optim {

/// What FusedOptimizer (fused_optimizer.h) does. Where ranks reach each other's memory, each takes pieces of the work
/// as it has time, and parameters and state are there once; elsewhere each rank updates its own from gradients that
/// backward() has averaged.
class FusedUpdate final : private comm::ChunkSink, private ddp::BackwardUpdater {
 public:
  /// `rule` outlives this.
  FusedUpdate(std::shared_ptr<ddp::GradientSource> source, UpdateRule& rule, const FusedOptions& options);
  ~FusedUpdate() override;

  bool shares_parameters() const { return storage_.shared(); }
  void step();
  void average_gradients();
  at::Tensor clip_grad_norm(double max_norm);
  void clip_grad_value(double max);
  void change_parameters(const std::function<void()>& change);
  void update_in_backward(bool on);
  amp::UnscaleResult unscale(double inverse_scale);
  bool step_unless_found_inf(const at::Tensor& found_inf);
  void skip_step();
  void sync_step_counts();

  /// What torch's Optimizer::load() has put into the rule's place moves into this memory.
  void import_loaded_state();
  std::vector<std::pair<std::string, at::Tensor>> state_dict(bool copies);
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  struct OptimizerAttachment {
    OptimizerAttachment(ddp::GradientSource& from, comm::ChunkSink* sink)
        : source(from), can_run_pass(from.attach_optimizer(sink)) {}
    ~OptimizerAttachment() { source.detach(); }
    ddp::GradientSource& source;
    const bool can_run_pass;
  };

  void take(const comm::Piece& chunk) override;
  void finish_gradient(std::size_t part) override;
  std::uint64_t begin_update() override;
  void end_update(bool consumed_chunks) override;
  std::uint64_t prepare();
  double squares();
  double factor() const;
  void check_not_scaled_twice();
  void end_step();
  void require_clippable(const std::string& call) const;
  void measure_norms(std::uint64_t options);
  void initialize_state(std::size_t part);
  void run_pass(comm::GradientUse use, std::uint64_t options);
  void update_all(std::uint64_t options);
  template <typename Act>
  void with_args(const comm::Piece& chunk, std::size_t first, std::size_t end, const Act& act) const;
  void run_local_pass();
  void run_foreach_pass();
  KernelArgs make_args(const comm::Piece& chunk) const;

  const std::shared_ptr<ddp::GradientSource> source_;
  UpdateRule& rule_;
  const bool foreach_;
  const OptimizerAttachment attachment_;
  const std::unique_ptr<StateSharding> shards_;  // null: state is not divided
  ParameterStorage storage_;
  std::optional<ForeachPass> foreach_pass_;                      // if foreach_
  at::Tensor found_inf_;                                         // of the step that goes on; undefined: it is made
  comm::GradientUse gradient_use_ = comm::GradientUse::kUpdate;  // of the pass that goes on
  std::vector<bool> has_sums_;                                   // parts whose squares the last pass has summed
  bool measuring_norms_ = false;                                 // what is summed is what the rule measures
  struct Clip {
    double factor = 1;                                     // scales gradients,
    double max = std::numeric_limits<double>::infinity();  // beyond which, then, their values are cut
    std::uint64_t backward = 0;                            // of the backward() of this number
    bool requested = false;                                // since the last step()
  } clip_;
  struct Unscaling {
    double inverse;
    std::uint64_t backward;  // its number
    double squares;          // summed, of the scaled gradients
  };
  std::optional<Unscaling> unscaling_;  // of gradients that are this rank's own, in the next step()
  bool updates_in_backward_ = false;
  bool updated_in_backward_ = false;       // in a backward(), since the last step()
  std::uint64_t options_fingerprint_ = 0;  // of that update
};

}  // namespace lockstep::optim
