// Forwards FusedOptimizer's functions to FusedUpdate.
#include "lockstep/optim/fused/fused_optimizer.h"

#include "lockstep/optim/fused/fused_update.h"

namespace lockstep::optim::inline fused {

FusedOptimizer::FusedOptimizer() = default;
FusedOptimizer::~FusedOptimizer() = default;

void FusedOptimizer::average_gradients() { update_->average_gradients(); }
at::Tensor FusedOptimizer::clip_norm(double max_norm) { return update_->clip_grad_norm(max_norm); }
void FusedOptimizer::clip_value(double max) { update_->clip_grad_value(max); }
void FusedOptimizer::change_parameters(const std::function<void()>& change) { update_->change_parameters(change); }
void FusedOptimizer::update_in_backward(bool on) { update_->update_in_backward(on); }
bool FusedOptimizer::shares_parameters() const { return update_->shares_parameters(); }
amp::UnscaleResult FusedOptimizer::unscale(const at::Tensor& inverse_scale) { return update_->unscale(inverse_scale); }
bool FusedOptimizer::step_unless_found_inf(const at::Tensor& found_inf) {
  return update_->step_unless_found_inf(found_inf);
}
void FusedOptimizer::sync_step_counts() const { update_->sync_step_counts(); }
void FusedOptimizer::skip_step() { update_->end_step(); }
at::Tensor FusedOptimizer::step_fused(const std::function<at::Tensor()>& closure) { return update_->step(closure); }
void FusedOptimizer::import_loaded_state() { update_->import_loaded_state(); }

checkpoint::StateDict FusedOptimizer::state_dict() const { return update_->state_dict(); }
void FusedOptimizer::load_state_dict(const checkpoint::StateDict& state) { update_->load_state_dict(state); }

}  // namespace lockstep::optim::inline fused
