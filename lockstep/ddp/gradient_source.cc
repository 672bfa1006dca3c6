// What an optimizer asks of a DistributedDataParallel.
#include "lockstep/ddp/gradient_source.h"

#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {

using base::UsageError;

std::vector<GradientSource::Parameter> DistributedDataParallel::Impl::parameters() const {
  std::vector<Parameter> all;
  for (const Watched& parameter : parameters_) all.push_back({parameter.name, parameter.tensor});
  return all;
}

void DistributedDataParallel::Impl::require_open() const {
  if (closed_)
    throw UsageError("the DistributedDataParallel that this optimizer was made from is gone",
                     "it must live as long as the optimizer is used");
}

bool DistributedDataParallel::Impl::attach(comm::PieceSink* updated) {
  require_open();
  if (has_optimizer_)
    throw UsageError("this DistributedDataParallel has an optimizer of lockstep::optim already",
                     "one optimizer may have several groups of parameters; two need a DistributedDataParallel each");
  if (updated && peers_.transport() == "hierarchy" && !exchange_->pieces()) {
    sharers_ = peers_.split_by_host();
    std::vector<comm::Part> parts;
    for (const Watched& parameter : parameters_) parts.push_back({parameter.name, parameter.tensor.detach()});
    among_sharers_ = sharers_->make_exchange("means", std::move(parts), {.bucket_bytes = {1}});
  }
  has_optimizer_ = true;  // what throws has come before
  updated_ = updated;
  return leaves_gradients() || (among_sharers_ && among_sharers_->pieces());
}

GradientSource::Owners DistributedDataParallel::Impl::owners() {
  require_open();
  if (leaves_gradients() && !sharers_) return {};
  divided_ = peers_.size() > 1;
  if (!sharers_) return {.group = peers_, .index = peers_.rank(), .count = peers_.size()};
  const bool leads = sharers_->rank() == 0;
  comm::Group leaders = peers_.split(leads ? 0 : 1);
  const at::Tensor place = at::empty({2}, at::kLong);
  place[0] = leaders.rank();
  place[1] = leaders.size();
  sharers_->broadcast(place, 0, {.name = "owners of state"});
  const auto* numbers = place.const_data_ptr<std::int64_t>();
  divided_ = numbers[1] > 1;
  return {.group = leads ? std::optional(leaders) : std::nullopt,
          .index = static_cast<int>(numbers[0]),
          .count = static_cast<int>(numbers[1]),
          .of_several = sharers_->size() > 1};
}

void DistributedDataParallel::Impl::updated() {
  require_open();
  if (!leaves_gradients()) end_step();  // else the pass has ended it
}

bool DistributedDataParallel::Impl::own_gradients() const {
  require_open();
  return leaves_gradients() && !averaged_;
}

void DistributedDataParallel::Impl::update_in_backward(BackwardUpdater* updater) {
  require_open();
  if (no_sync_ > 0)
    throw UsageError("update_in_backward(): there is a no_sync(), which would keep gradients for a later backward()");
  updater_ = updater;
  witness_.forget();
}

void DistributedDataParallel::Impl::refuse_early_update() const {
  const std::string start = "backward() that updates parameters (update_in_backward() of the optimizer): ";
  if (left_over_)
    throw UsageError(
        start + "gradients of an earlier one are there, and would be counted again",
        "call zero_grad() before each backward(); to accumulate gradients, do without update_in_backward()");
  if (reentrant_)
    throw UsageError(start +
                         "the model runs backward() inside backward(), which may need the old values of a parameter "
                         "that has been updated",
                     "do without update_in_backward()");
}

/// The first gradient of a backward() that updates parameters.
void DistributedDataParallel::Impl::begin_update() {
  comm::StepIdentity step = group_.step_identity();
  const std::uint64_t options = updater_->begin_update();
  if (!leaves_gradients()) return begin_exchange(step);
  step.use = comm::Use::kEarlyUpdate;
  step.options = options;
  begin_exchange(step);
  exchange_->pieces()->give_to(*updated_);
}

void DistributedDataParallel::Impl::end_update() {
  updater_->end_update(leaves_gradients());
  for (std::size_t i = 0; i < parameters_.size(); ++i) witness_.note(i, parameters_[i].tensor.grad());
}

void DistributedDataParallel::Impl::detach() noexcept {
  has_optimizer_ = false;
  updated_ = nullptr;
  updater_ = nullptr;
  averaged_ = false;
  divided_ = false;
  witness_.forget();
  among_sharers_.reset();
  sharers_.reset();
}

comm::CommonMemory DistributedDataParallel::Impl::make_common(std::size_t bytes) {
  require_open();
  return (among_sharers_ ? among_sharers_ : exchange_)->pieces()->make_common(bytes);
}

void DistributedDataParallel::Impl::require_unchanged() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!witness_.unchanged(i, parameters_[i].tensor.grad()))
      throw updater_ ? UsageError("the gradient of " + parameters_[i].name +
                                      " was changed between backward() and step(), after it had been used: backward() "
                                      "updates parameters",
                                  "do without update_in_backward() of the optimizer")
                     : UsageError("the gradient of " + parameters_[i].name +
                                      " was changed between backward() and step(), while it was this rank's own",
                                  "call the optimizer's average_gradients() before changing gradients, or "
                                  "clip_grad_norm() instead of torch's");
}

void DistributedDataParallel::Impl::average() {
  require_open();
  if (!leaves_gradients() || averaged_) return;  // otherwise they are means
  require_unchanged();
  const at::NoGradGuard no_grad;
  begin_exchange(group_.step_identity());
  finish_exchange();
  witness_.forget();
  averaged_ = true;
}

void DistributedDataParallel::Impl::give(comm::Use use, std::uint64_t options, comm::PieceSink& sink) {
  require_open();
  const at::NoGradGuard no_grad;
  comm::StepIdentity step = group_.step_identity();
  step.use = use;
  step.options = options;
  if (among_sharers_)
    give_means(step, sink);
  else
    give_own(step, sink);
}

void DistributedDataParallel::Impl::give_own(comm::StepIdentity step, comm::PieceSink& sink) {
  if (!averaged_) require_unchanged();
  step.averaged = averaged_;
  begin_exchange(step);
  open_ = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].tensor.grad().defined()) continue;
    const at::Tensor before = parameters_[i].tensor.grad();
    hand_over(i, true);
    if (!before.is_same(parameters_[i].tensor.grad())) witness_.note(i, parameters_[i].tensor.grad());  // it has moved
  }
  close_exchange(exchange_->pieces()->finish_pieces(sink), step.use == comm::Use::kUpdate);
  if (step.use == comm::Use::kUpdate) witness_.forget();
}

void DistributedDataParallel::Impl::give_means(comm::StepIdentity step, comm::PieceSink& sink) {
  step.averaged = true;
  among_sharers_->begin(step, {});
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].tensor.grad().defined()) among_sharers_->ready(i, parameters_[i].tensor.grad(), true);
  among_sharers_->pieces()->finish_pieces(sink);
}

}  // namespace lockstep::ddp
