// The GradientSource interface of DistributedDataParallel.
#include "lockstep/ddp/gradient_source.h"

#include "lockstep/base/error.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/reducers/in_place_gradient_reducer.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {

using base::UsageError;

std::vector<GradientSource::Parameter> DistributedDataParallel::Impl::parameters() const {
  std::vector<Parameter> all;
  for (const HookedParameter& parameter : parameters_) all.push_back({parameter.name, parameter.tensor});
  return all;
}

void DistributedDataParallel::Impl::require_attached() const {
  if (detached_)
    throw UsageError("lockstep::optim: the DistributedDataParallel of this optimizer has been destroyed",
                     "keep it alive as long as the optimizer is used");
}

bool DistributedDataParallel::Impl::attach_optimizer(comm::ChunkSink* sink) {
  require_attached();
  if (optimizer_.is_attached)
    throw UsageError("lockstep::optim: this DistributedDataParallel already has an optimizer",
                     "use one optimizer with several parameter groups, or one DistributedDataParallel per optimizer");
  if (sink && reduce_group_.transport() == "hierarchy" && !in_place_reducer_) {
    optimizer_.host_group = reduce_group_.split_by_host();
    std::vector<comm::GradientSpec> specs;
    for (const HookedParameter& parameter : parameters_) specs.push_back({parameter.name, parameter.tensor.detach()});
    optimizer_.host_reducer = comm::GroupAccess::make_gradient_reducer(*optimizer_.host_group, "means",
                                                                       std::move(specs), {.bucket_bytes = {1}});
  }
  optimizer_.is_attached = true;  // nothing below throws
  optimizer_.sink = sink;
  return keeps_local_gradients() || (optimizer_.host_reducer && optimizer_.host_reducer->in_place());
}

GradientSource::ShardOwners DistributedDataParallel::Impl::shard_owners() {
  require_attached();
  if (keeps_local_gradients() && !optimizer_.host_group) return {};
  optimizer_.has_sharded_state = reduce_group_.size() > 1;
  if (!optimizer_.host_group)
    return {.group = reduce_group_, .index = reduce_group_.rank(), .count = reduce_group_.size()};
  const bool is_leader = optimizer_.host_group->rank() == 0;
  comm::Group leaders = reduce_group_.split(is_leader ? 0 : 1);
  const at::Tensor place = at::empty({2}, at::kLong);
  place[0] = leaders.rank();
  place[1] = leaders.size();
  optimizer_.host_group->broadcast(place, 0, {.name = "owners of state"});
  const auto* numbers = place.const_data_ptr<std::int64_t>();
  optimizer_.has_sharded_state = numbers[1] > 1;
  return {.group = is_leader ? std::optional(leaders) : std::nullopt,
          .index = static_cast<int>(numbers[0]),
          .count = static_cast<int>(numbers[1]),
          .has_several_ranks = optimizer_.host_group->size() > 1};
}

void DistributedDataParallel::Impl::scatter_means(const std::vector<std::vector<comm::ElementRange>>& shards,
                                                  int owner) {
  require_attached();
  if (!optimizer_.host_reducer || options_.hook) return;
  // Shards are counted in the memory of parameters, and gradients are reduced in the strides that these had before.
  for (const HookedParameter& parameter : parameters_)
    if (parameter.tensor.strides() != at::IntArrayRef(parameter.reduced_strides)) return;
  reducer_->set_needed(shards);
  optimizer_.shards = shards[static_cast<std::size_t>(owner)];
}

/// Whether gradient `index` is a mean also outside the shard.
bool DistributedDataParallel::Impl::is_complete_mean(std::size_t index) const {
  const at::Tensor& gradient = parameters_[index].tensor.grad();
  return !gradient.defined() || gradient.layout() != at::kStrided ||
         !parameters_[index].tensor.is_non_overlapping_and_dense();
}

/// Gradients that are means only in the shards become means. A collective of all ranks.
void DistributedDataParallel::Impl::complete_means() {
  constexpr int kOften = 3;
  const bool is_leader = optimizer_.host_group->rank() == 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_complete_mean(i)) continue;
    // The sum of what one rank of each host has, and of zeros.
    const at::Tensor gradient = parameters_[i].tensor.grad().data();
    const at::Tensor flat = gradient.as_strided({gradient.numel()}, {1});
    const auto [first, count] = optimizer_.shards[i];
    flat.slice(0, 0, is_leader ? static_cast<std::int64_t>(first) : flat.numel()).zero_();
    if (is_leader) flat.slice(0, static_cast<std::int64_t>(first + count)).zero_();
    reduce_group_.all_reduce(flat, comm::ReduceOp::kSum, {.name = parameters_[i].name});
  }
  optimizer_.are_means_partial = false;
  gradient_fingerprint_.clear();
  // A program that needs them in each step gets them from backward(), for fewer bytes.
  if (++optimizer_.num_completed < kOften) return;
  reducer_->set_needed({});
  optimizer_.shards.clear();
}

/// The part of gradient `index` in the shard.
at::Tensor DistributedDataParallel::Impl::shard_of_gradient(std::size_t index) const {
  const at::Tensor gradient = parameters_[index].tensor.grad().data();  // a graph may have saved it
  const auto [first, count] = optimizer_.shards[index];
  return gradient.as_strided({gradient.numel()}, {1})
      .narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(count));
}

/// backward() will add to gradients of an earlier one, which are means only in the shards. These are put aside until
/// the next reduction has averaged what is added, so that no other rank takes part here: this backward() may be one
/// that only accumulates.
void DistributedDataParallel::Impl::put_partial_means_aside() {
  const at::NoGradGuard no_grad;
  const auto is_zero = [](const HookedParameter& parameter) {
    return !parameter.tensor.grad().defined() || !parameter.tensor.grad().any().item<bool>();
  };
  const bool are_zero = std::all_of(parameters_.begin(), parameters_.end(), is_zero);
  if (!optimizer_.means_aside.empty()) {
    if (are_zero) optimizer_.means_aside.clear();  // by the program
    return;
  }
  if (!are_zero) require_gradients_unchanged();
  optimizer_.means_aside.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_complete_mean(i)) continue;
    optimizer_.means_aside[i] = shard_of_gradient(i).clone();
    parameters_[i].tensor.grad().data().zero_();
  }
}

/// After the reduction of what was added to them.
void DistributedDataParallel::Impl::add_means_aside() {
  for (std::size_t i = 0; i < optimizer_.means_aside.size(); ++i)
    if (optimizer_.means_aside[i].defined() && parameters_[i].tensor.grad().defined())
      shard_of_gradient(i).add_(optimizer_.means_aside[i]);
  optimizer_.means_aside.clear();
}

void DistributedDataParallel::Impl::on_parameters_updated() {
  require_attached();
  if (!keeps_local_gradients()) end_step(true);  // with local gradients, the pass has called it
}

bool DistributedDataParallel::Impl::has_local_gradients() const {
  require_attached();
  return has_partial_means() || (keeps_local_gradients() && !optimizer_.has_averaged_gradients);
}

void DistributedDataParallel::Impl::update_in_backward(BackwardUpdater* updater) {
  require_attached();
  if (no_sync_depth_ > 0)
    throw UsageError("update_in_backward(): called under no_sync(), which keeps gradients for a later backward()",
                     "call update_in_backward() outside no_sync()");
  optimizer_.updater = updater;
  gradient_fingerprint_.clear();
}

void DistributedDataParallel::Impl::check_backward_update() const {
  const std::string start = "backward() with update_in_backward() of the optimizer: ";
  if (pass_.has_leftover_gradients)
    throw UsageError(
        start + "gradients of an earlier backward() exist and would be counted again",
        "call zero_grad() before each backward(), or disable update_in_backward() to accumulate gradients");
  if (reentrant_)
    throw UsageError(start +
                         "the model runs backward() inside backward(), which may need the old values of a parameter "
                         "that has been updated",
                     "disable update_in_backward()");
}

/// Called for the first gradient of a backward() that updates parameters.
void DistributedDataParallel::Impl::begin_update() {
  comm::StepIdentity step = comm::GroupAccess::step_identity(group_);
  const std::uint64_t options_hash = optimizer_.updater->begin_update();
  if (!keeps_local_gradients()) return begin_reduction(step, nullptr);
  step.use = comm::GradientUse::kUpdateInBackward;
  step.options_hash = options_hash;
  begin_reduction(step, optimizer_.sink);
}

void DistributedDataParallel::Impl::end_update() {
  optimizer_.updater->end_update(keeps_local_gradients());
  for (std::size_t i = 0; i < parameters_.size(); ++i) gradient_fingerprint_.record(i, parameters_[i].tensor.grad());
}

void DistributedDataParallel::Impl::detach_optimizer() noexcept {
  optimizer_.host_reducer.reset();  // before its group
  if (!optimizer_.shards.empty()) reducer_->set_needed({});
  if (has_partial_means())  // nobody would know any more that they are no means
    for (const HookedParameter& parameter : parameters_) parameter.tensor.mutable_grad() = at::Tensor();
  optimizer_ = {};
  gradient_fingerprint_.clear();
}

comm::SharedAllocation DistributedDataParallel::Impl::allocate_shared(std::size_t bytes) {
  require_attached();
  return (optimizer_.host_reducer ? optimizer_.host_reducer->in_place() : in_place_reducer_)->allocate_shared(bytes);
}

void DistributedDataParallel::Impl::set_parameter_memory(std::vector<at::Tensor> memory) {
  require_attached();
  for (std::size_t i = 0; i < memory.size(); ++i)
    optimizer_.parameter_memory.emplace(parameters_[i].tensor.const_data_ptr(), std::move(memory[i]));
}

/// Where to write new values of a parameter or buffer.
const at::Tensor& DistributedDataParallel::Impl::memory_of(const at::Tensor& tensor) const {
  const auto found = optimizer_.parameter_memory.find(tensor.const_data_ptr());
  return found == optimizer_.parameter_memory.end() ? tensor : found->second;
}

void DistributedDataParallel::Impl::require_outside_backward() const {
  if (Backward::current())
    throw UsageError(
        "step() was called inside backward(), before the gradients were averaged over the ranks",
        "call step() after backward(); an optimizer of lockstep::optim updates each parameter in backward() after "
        "update_in_backward()");
}

void DistributedDataParallel::Impl::require_gradients_unchanged() const {
  if (!optimizer_.means_aside.empty())
    throw UsageError(
        "backward() under no_sync() has added to gradients that are means in this host's part only, and no backward() "
        "outside no_sync() has followed",
        "call backward() outside no_sync() last, call average_gradients() before, or disable shard_state");
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!gradient_fingerprint_.is_unchanged(i, parameters_[i].tensor.grad()))
      throw optimizer_.updater
          ? UsageError("the gradient of " + parameters_[i].name +
                           " was changed between backward() and step(), after backward() had used it to update the "
                           "parameter",
                       "disable update_in_backward() of the optimizer")
          : UsageError("the gradient of " + parameters_[i].name +
                           " was changed between backward() and step(), before it was averaged over the ranks",
                       "call the optimizer's average_gradients() before changing gradients, or its clip_grad_norm() "
                       "instead of torch's");
}

void DistributedDataParallel::Impl::average_gradients() {
  require_attached();
  if (!has_local_gradients()) return;  // they are means already
  require_gradients_unchanged();
  const at::NoGradGuard no_grad;
  if (has_partial_means()) return complete_means();
  begin_reduction(comm::GroupAccess::step_identity(group_), nullptr);
  finish_reduction();
  gradient_fingerprint_.clear();
  optimizer_.has_averaged_gradients = true;
}

void DistributedDataParallel::Impl::run_pass(comm::GradientUse use, std::uint64_t options_hash, comm::ChunkSink& sink) {
  require_attached();
  const at::NoGradGuard no_grad;
  comm::StepIdentity step = comm::GroupAccess::step_identity(group_);
  step.use = use;
  step.options_hash = options_hash;
  if (optimizer_.host_reducer) return run_pass_on_means(step, sink);
  if (!optimizer_.has_averaged_gradients) require_gradients_unchanged();
  step.already_averaged = optimizer_.has_averaged_gradients;
  begin_reduction(step, nullptr);
  reduction_ = Reduction::kUnfinished;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    const at::Tensor place = gradient.defined() ? reducer_->ready(i, gradient, true) : at::Tensor();
    if (!place.defined()) continue;
    consume(i, place);
    gradient_fingerprint_.record(i, parameters_[i].tensor.grad());  // consume() has moved it to other memory
  }
  complete_reduction(in_place_reducer_->finish_fused(sink), step.use == comm::GradientUse::kUpdate);
  if (step.use == comm::GradientUse::kUpdate) {
    gradient_fingerprint_.clear();
    optimizer_.has_averaged_gradients = false;  // the next ones need not come from backward()
  }
}

void DistributedDataParallel::Impl::run_pass_on_means(comm::StepIdentity step, comm::ChunkSink& sink) {
  if (has_partial_means()) require_gradients_unchanged();
  step.already_averaged = true;
  optimizer_.host_reducer->begin(step, {}, nullptr);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].tensor.grad().defined()) optimizer_.host_reducer->ready(i, parameters_[i].tensor.grad(), true);
  optimizer_.host_reducer->in_place()->finish_fused(sink);
}

}  // namespace lockstep::ddp
