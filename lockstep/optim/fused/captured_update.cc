// Updates in a step of which a CUDA graph is made (cuda/graphed_step.h).
#include <ATen/core/grad_mode.h>

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/captured_step.h"
#include "lockstep/optim/fused/fused_update.h"

namespace lockstep::optim::inline fused {

using base::UsageError;
using comm::CapturedStep;

/// Makes an update of which a CUDA graph may be made: the device reads learning rates and step counts from its memory,
/// and the host writes and counts them for each replay. Other options must stay as they are now.
void FusedUpdate::step_captured(CapturedStep& step) {
  const at::NoGradGuard no_grad;
  const std::uint64_t options_hash = prepare();
  const auto with_this = [self = weak_from_this()](auto work) {
    return [self, work = std::move(work)] {
      const auto update = self.lock();
      if (!update) throw UsageError("GraphedStep: the optimizer of the captured step has been destroyed");
      work(*update);
    };
  };
  step.add_host_work(
      with_this([constants = rule_.hash_of_constants()](FusedUpdate& update) { update.write_lr(constants); }));
  const bool may_be_skipped = found_inf_.defined();
  auto indices = foreach_pass_->update(found_inf_, /*lr_on_device=*/true);
  if (shards_) shards_->all_gather_parameters(options_hash, storage_);
  source_->on_parameters_updated();
  step.add_host_work(with_this([indices = std::move(indices), may_be_skipped](FusedUpdate& update) {
    for (const std::size_t index : indices) update.rule_.on_updated(index, update.storage_.states(index));
    if (may_be_skipped) update.foreach_pass_->mark_step_counts_stale();
    update.end_step();
  }));
}

void FusedUpdate::write_lr(std::uint64_t constants) {
  prepare();
  if (rule_.hash_of_constants() != constants)
    throw UsageError(
        "lockstep::optim: an option has been changed since the step was captured as a CUDA graph; expected changes of "
        "learning rates only",
        "make a new GraphedStep");
  const at::NoGradGuard no_grad;
  foreach_pass_->write_lr();
}

}  // namespace lockstep::optim::inline fused
