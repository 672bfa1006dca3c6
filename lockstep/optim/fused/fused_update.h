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
#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/fused/update_rule.h"
#include "lockstep/optim/fused/state_sharding.h"
#include "lockstep/optim/fused/foreach_pass.h"

namespace lockstep::optim {

/// What FusedOptimizer (fused_optimizer.h) does. Where ranks reach each other's memory, each takes pieces of the work
/// as it has time, and parameters and state are there once; elsewhere each rank updates its own from gradients that
/// backward() has averaged.
class FusedUpdate final : private comm::PieceSink, private ddp::BackwardUpdater {
 public:
  /// `rule` outlives this.
  FusedUpdate(std::shared_ptr<ddp::GradientSource> source, Rule& rule, const FusedOptions& options);
  ~FusedUpdate() override;

  bool shares_parameters() const { return home_.shared(); }
  void step();
  void average_gradients();
  at::Tensor clip_grad_norm(double max_norm);
  void clip_grad_value(double max);
  void change_parameters(const std::function<void()>& change);
  void update_in_backward(bool on);
  amp::Unscaled unscale(double inverse_scale);
  bool step_unless(const at::Tensor& skip);
  void skip_step();
  void settle();

  /// What torch's Optimizer::load() has put into the rule's place moves into this memory.
  void adopt_loaded();
  std::vector<std::pair<std::string, at::Tensor>> state_dict(bool copies);
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  struct Attached {
    Attached(ddp::GradientSource& from, comm::PieceSink* sink) : source(from), gives_pieces(from.attach(sink)) {}
    ~Attached() { source.detach(); }
    ddp::GradientSource& source;
    const bool gives_pieces;
  };

  void take(const comm::Piece& piece) override;
  void taken(std::size_t part) override;
  std::uint64_t begin_update() override;
  void end_update(bool given) override;
  std::uint64_t prepare();
  double squares();
  double factor() const;
  void require_one_scale();
  void end_step();
  void require_clippable(const std::string& call) const;
  void measure(std::uint64_t options);
  void start_state(std::size_t part);
  void pass(comm::Use use, std::uint64_t options);
  void update_all(std::uint64_t options);
  template <typename Act>
  void with_run(const comm::Piece& piece, std::size_t first, std::size_t end, const Act& act) const;
  void pass_alone();
  void pass_by_operations();
  Run run_of(const comm::Piece& piece) const;

  const std::shared_ptr<ddp::GradientSource> source_;
  Rule& rule_;
  const bool by_operations_;
  const Attached attached_;
  const std::unique_ptr<Shards> shards_;  // null: state is not divided
  ParameterHome home_;
  std::optional<TensorPass> tensors_;   // if by_operations_
  at::Tensor skip_;                     // of the step that goes on; undefined: it is made
  comm::Use use_ = comm::Use::kUpdate;  // of the pass that goes on
  std::vector<bool> summed_;            // parts whose squares the last pass has summed
  bool measuring_ = false;              // what is summed is what the rule measures
  struct Clip {
    double factor = 1;                                     // scales gradients,
    double max = std::numeric_limits<double>::infinity();  // beyond which, then, their values are cut
    std::uint64_t backward = 0;                            // of the backward() of this number
    bool asked = false;                                    // since the last step()
  } clip_;
  struct Unscaling {
    double inverse;
    std::uint64_t backward;  // its number
    double squares;          // summed, of the scaled gradients
  };
  std::optional<Unscaling> unscaling_;  // of gradients that are this rank's own, in the next step()
  bool in_backward_ = false;
  bool updated_ = false;       // in a backward(), since the last step()
  std::uint64_t options_ = 0;  // of that update
};

}  // namespace lockstep::optim
