// DistributedDataParallel: the reduction of each backward(), and shadow reductions for join().
#include "lockstep/ddp/ddp.h"

#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <exception>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/reducers/in_place_gradient_reducer.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {
namespace {

using base::UsageError;

/// The memory of a complex tensor as one of real numbers; other tensors as they are.
at::Tensor real_view(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

/// Returns whether gradients of the parameter can be averaged. Throws UsageError if they cannot but are required.
bool check_gradient_dtype(const std::string& name, const at::Tensor& parameter) {
  switch (parameter.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kComplexFloat:
    case at::kComplexDouble: return true;
    default: break;
  }
  if (parameter.requires_grad())
    throw UsageError("DistributedDataParallel: parameter " + name + " requires a gradient and is " +
                     c10::toString(parameter.scalar_type()) +
                     "; expected float32, float64, float16, bfloat16, complex64 or complex128");
  return false;
}

NamedTensors remove_ignored(NamedTensors tensors, const std::vector<std::string>& ignored) {
  std::erase_if(tensors, [&](const auto& item) {
    return std::find(ignored.begin(), ignored.end(), item.first) != ignored.end();
  });
  return tensors;
}

NamedTensors dense_buffers(const ModelTensors& model, const std::vector<std::string>& ignored) {
  NamedTensors buffers = remove_ignored(model.buffers, ignored);
  require_dense(buffers, "buffer", "DistributedDataParallel");
  return buffers;
}

void check_options(const DdpOptions& options, const NamedTensors& parameters, const NamedTensors& buffers) {
  if (!(options.gradient_predivide_factor >= 0) || !std::isfinite(options.gradient_predivide_factor))
    throw UsageError("DdpOptions.gradient_predivide_factor is " + std::to_string(options.gradient_predivide_factor) +
                     "; expected a finite number of 0 or more");
  for (const std::int64_t bytes : options.bucket_bytes)
    if (bytes < 1 || options.bucket_bytes.size() > 2)
      throw UsageError("DdpOptions.bucket_bytes holds " + std::to_string(bytes) + " and has " +
                       std::to_string(options.bucket_bytes.size()) + " sizes; expected one or two, of 1 or more");
  if (options.wire_dtype != at::kFloat && options.wire_dtype != at::kBFloat16 && options.wire_dtype != at::kHalf)
    throw UsageError(std::string("DdpOptions.wire_dtype is ") + c10::toString(options.wire_dtype) +
                         "; expected float32, bfloat16 or float16",
                     "for int8, use the hook Int8Hook, in Python hook=lockstep.Int8()");
  if (options.wire_dtype != at::kFloat && options.hook)
    throw UsageError("DdpOptions.wire_dtype is " + std::string(comm::name(options.wire_dtype)) + " with the hook " +
                     options.hook->name() + ", which chooses its own wire format; expected float32 with a hook");
  if (options.compare_replicas_every < 0)
    throw UsageError("DdpOptions.compare_replicas_every is " + std::to_string(options.compare_replicas_every) +
                     "; expected 0 or more");
  if (options.average_hosts_every < 1)
    throw UsageError("DdpOptions.average_hosts_every is " + std::to_string(options.average_hosts_every) +
                     "; expected 1 or more");
  for (const std::string& name : options.ignore) {
    const auto named = [&](const auto& item) { return item.first == name; };
    if (std::none_of(parameters.begin(), parameters.end(), named) &&
        std::none_of(buffers.begin(), buffers.end(), named))
      throw UsageError("DdpOptions.ignore: \"" + name + "\" is not a parameter or buffer of the module");
  }
}

/// The value of an option, as it is compared between the ranks.
template <typename Value>
std::string option_text(const Value& value) {
  if constexpr (std::is_same_v<Value, std::string>)
    return value;
  else if constexpr (std::is_same_v<Value, BufferMode>)
    return value == BufferMode::kBroadcast ? "broadcast" : value == BufferMode::kMean ? "mean" : "local";
  else if constexpr (std::is_same_v<Value, std::shared_ptr<comm::GradientHook>>)
    return value ? value->name() : "none";
  else if constexpr (std::is_same_v<Value, at::ScalarType>)
    return std::string(comm::name(value));
  else if constexpr (std::is_same_v<Value, Payload>)
    return std::to_string(static_cast<int>(value));
  else if constexpr (std::is_same_v<Value, OuterMethod>) {
    std::string text = "method " + std::to_string(value.index());
    std::visit(
        [&](const auto& method) {
          visit_outer(method, [&](const char* name, const auto& member) {
            text += std::string(" ") + name + " " + option_text(member);
          });
        },
        value);
    return text;
  } else if constexpr (std::is_arithmetic_v<Value>)
    return std::to_string(value);
  else
    return base::joined(value, ",", [](const auto& item) { return option_text(item); });
}

}  // namespace

DistributedDataParallel::Impl::Impl(ModelTensors model, ModuleWatch watch, comm::Group the_group, DdpOptions options)
    : group_(std::move(the_group)),
      options_(std::move(options)),
      reduce_group_(group_),
      buffers_(dense_buffers(model, options_.ignore), options_.buffers),
      module_watch_(std::move(watch)) {
  check_options(options_, model.parameters, model.buffers);
  const NamedTensors parameters = remove_ignored(std::move(model.parameters), options_.ignore);
  const NamedTensors buffers = dense_buffers(model, options_.ignore);
  require_dense(parameters, "parameter", "DistributedDataParallel");
  if (std::none_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.second.requires_grad(); }))
    throw UsageError("DistributedDataParallel: no parameter of the module requires a gradient",
                     "evaluate the module without a DistributedDataParallel, or make a parameter trainable");
  std::string text;
  visit_options(options_, [&](const char* name, const auto& value) {
    // A tensor that one rank ignores, the others need not have.
    if (&value != static_cast<const void*>(&options_.ignore))
      text += std::string(name) + " " + option_text(value) + " ";
  });
  const bool are_buffers_local = options_.buffers == BufferMode::kLocal;
  compare_models(parameters, model.broadcast || !are_buffers_local ? buffers : NamedTensors(), text, group_);
  all_tensors_ = parameters;
  num_parameters_ = parameters.size();
  all_tensors_.insert(all_tensors_.end(), buffers.begin(), buffers.end());
  if (model.broadcast) broadcast_tensors(all_tensors_, group_);
  if (are_buffers_local) all_tensors_ = parameters;

  if (options_.average_hosts_every > 1 || options_.outer.index() > 0) {
    reduce_group_ = group_.split_by_host();
    make_host_averager();
  }

  NamedTensors compared;
  std::vector<comm::GradientSpec> specs;
  for (const auto& [name, tensor] : parameters) {
    compared.emplace_back(name, tensor.detach());
    if (!check_gradient_dtype(name, tensor)) continue;
    specs.push_back({name, real_view(tensor.detach())});
    parameters_.push_back({.name = name, .tensor = tensor, .reduced_strides = tensor.strides().vec()});
  }
  const std::string name = specs.front().name + "..";
  reducer_ = comm::GroupAccess::make_gradient_reducer(reduce_group_, name, std::move(specs),
                                                      {.bucket_bytes = options_.bucket_bytes,
                                                       .hook = options_.hook,
                                                       .gradient_predivide_factor = options_.gradient_predivide_factor,
                                                       .wire_dtype = host_averager_ ? at::kFloat : options_.wire_dtype,
                                                       .layout = options_.bucket_layout,
                                                       .check_finite = options_.check_finite});
  in_place_reducer_ = reducer_->in_place();
  if (host_averager_ && host_link_->has_several_hosts() && options_.compare_replicas_every > 0)
    host_check_.emplace(compared, host_link_->group(), 0);
  replicas_.check.emplace(std::move(compared), reduce_group_, options_.compare_replicas_every);
  step_observer_ = comm::GroupAccess::on_step(group_, [this] { on_step_end(); });
  for (std::size_t i = 0; i < parameters_.size(); ++i) register_hooks(i);
  if (profile_) {
    std::vector<at::Tensor> tensors;
    for (const HookedParameter& parameter : parameters_) tensors.push_back(parameter.tensor);
    profiled_model_ = profile_->add_model(tensors);
  }
  add_backward_participant(this);
}

DistributedDataParallel::Impl::~Impl() { detach_module(); }

void DistributedDataParallel::Impl::detach_module() {
  if (detached_ || fork_guard_.is_copy_in_child()) return;
  detached_ = true;
  step_observer_.reset();
  remove_backward_participant(this);
  for (HookedParameter& parameter : parameters_) remove_hooks(parameter);
  if (std::uncaught_exceptions() > 0) return;
  if (can_compare_replicas() && reduction_ == Reduction::kNone && num_reductions_ > 0 &&
      num_reductions_ != replicas_.compared_at)
    replicas_.check->compare_at_end();
  if (num_reductions_ == 0 && replicas_.compared_at < 0 && group_.size() > 1 && group_.rank() == 0)
    base::log_warning(
        "the DistributedDataParallel of " + parameters_.front().name +
        ".. ends, and its ranks have never exchanged gradients: they have not trained together. Keep it alive while "
        "the model trains, and make a new one for a new module");
}

void DistributedDataParallel::Impl::submit_gradient(std::size_t index, bool fresh) {
  // A pending graph that needs the old values, but not this gradient, must fail instead of using the new ones.
  if (optimizer_.updater) torch::autograd::impl::bump_version(parameters_[index].tensor);
  // The gradient's own memory is released here, so that the next layers' gradients can reuse it.
  const at::Tensor place = reducer_->ready(index, real_view(parameters_[index].tensor.grad()), fresh);
  if (place.defined()) consume(index, place);
}

void DistributedDataParallel::Impl::on_backward_end() {
  end_of_hooks();
  num_backwards_ += pass_.has_reached_parameter;
  const bool is_profiled = profile_ && pass_.has_reached_parameter && no_sync_depth_ == 0;
  if (is_profiled) profile_->on_backward_end(profiled_model_);
  if (keeps_local_gradients() && !optimizer_.updater) {
    local_backwards_ += pass_.has_reached_parameter && no_sync_depth_ == 0;
    for (std::size_t i = 0; pass_.has_reached_parameter && i < parameters_.size(); ++i)
      gradient_fingerprint_.record(i, parameters_[i].tensor.grad());
  } else if (reduction_ == Reduction::kOpen) {
    finish_reduction();
    if (optimizer_.updater) end_update();
  }
  if (is_profiled) profile_->on_step_end(profiled_model_);
}

void DistributedDataParallel::Impl::on_backward_error(const std::string& why,
                                                      const std::vector<torch::autograd::Node*>& leaves) noexcept {
  end_of_hooks();
  if (profile_) profile_->on_backward_error(profiled_model_);
  if (reduction_ == Reduction::kOpen) {
    reduction_ = Reduction::kUnfinished;
    return reducer_->abandon("backward() failed: " + why.substr(0, why.find('\n')));
  }
  // The caller may catch the exception and go on. Then the next reduction tells whether all ranks have had it.
  const bool is_own = std::any_of(parameters_.begin(), parameters_.end(), [&](const HookedParameter& parameter) {
    return std::find(leaves.begin(), leaves.end(), parameter.raw) != leaves.end();
  });
  if (is_own && no_sync_depth_ == 0 && !keeps_local_gradients()) ++failed_backwards_;
}

std::vector<comm::Collective> DistributedDataParallel::Impl::make_extra_ops() {
  std::vector<comm::Collective> extra_ops;
  if (reduce_group_.size() == 1) return extra_ops;
  extra_ops = buffers_.pack();
  auto hashes = keeps_local_gradients() ? std::nullopt : replicas_.check->hashes_if_due(num_reductions_);
  replicas_.is_exchanging = hashes.has_value();
  if (hashes) extra_ops.push_back(std::move(*hashes));
  return extra_ops;
}

void DistributedDataParallel::Impl::begin_reduction(comm::StepIdentity step, comm::ChunkSink* early_sink) {
  step.optimizer_steps = optimizer_steps_;
  step.local_backwards = local_backwards_;
  step.failed_backwards = failed_backwards_;
  step.accumulating = accumulating_ && !keeps_local_gradients();
  reduction_ = Reduction::kUnfinished;
  reducer_->begin(step, make_extra_ops(), early_sink);
  reduction_ = Reduction::kOpen;
}

void DistributedDataParallel::Impl::finish_reduction() {
  const at::NoGradGuard no_grad;
  reduction_ = Reduction::kUnfinished;  // on_backward_error() must not abandon it from here on
  for (const std::size_t index : pass_.deferred) submit_gradient(index, true);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    HookedParameter& parameter = parameters_[i];
    // average_gradients() averages all gradients, also those that backward() has not written.
    const bool fresh = parameter.accumulated_locally || keeps_local_gradients();
    if (!reducer_->is_ready(i) && parameter.tensor.grad().defined()) submit_gradient(i, fresh);
  }
  const bool updates_from_chunks = optimizer_.updater && keeps_local_gradients();
  complete_reduction(updates_from_chunks ? in_place_reducer_->finish_fused(*optimizer_.sink) : reducer_->finish(*this),
                     updates_from_chunks || !optimizer_.is_attached);
  for (HookedParameter& parameter : parameters_) parameter.accumulated_locally = false;
  if (optimizer_.shards.empty()) return;
  add_means_aside();
  optimizer_.are_means_partial = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) gradient_fingerprint_.record(i, parameters_[i].tensor.grad());
}

void DistributedDataParallel::Impl::complete_reduction(const comm::Participation& participation, bool ends_step) {
  if (reduce_group_.size() > 1) {
    if (replicas_.is_exchanging && !join_.has_anyone_joined) replicas_.check->check_exchanged();
    buffers_.unpack(reduce_group_.size());
  }
  join_.has_anyone_joined |= participation.active < reduce_group_.size();
  join_.first_active_rank = participation.first_active;
  failed_backwards_ = 0;
  accumulating_ = false;
  reduction_ = Reduction::kNone;
  ++num_reductions_;
  stop_requested_ |= participation.stop_requested;
  if (ends_step) return end_step(optimizer_.is_attached);
  if (!host_averager_ && stop_requested_) comm::GroupAccess::set_stop_agreed(group_);
}

/// Called when parameters have been updated, or when an optimizer of torch is about to update them. Averages the
/// parameters between hosts if that is due: of an optimizer of torch, on_step_end() tells that it has updated them, and
/// if it did not come, the next reduction makes up for it.
void DistributedDataParallel::Impl::end_step(bool has_updated) {
  // With average_hosts_every a reduction covers one host; the other hosts receive a stop request when the hosts are
  // averaged.
  if (!host_averager_) {
    if (stop_requested_) comm::GroupAccess::set_stop_agreed(group_);
    return;
  }
  if (host_averager_->is_due()) average_hosts();
  host_averager_->count_reduction();
  if (has_updated && host_averager_->is_due()) average_hosts();
}

void DistributedDataParallel::Impl::on_update_skipped() {
  require_attached();
  if (host_averager_) end_step(true);
}

void DistributedDataParallel::Impl::on_step_end() {
  const bool is_between_steps = reduction_ == Reduction::kNone && !backward_ && !fork_guard_.is_copy_in_child();
  if (host_averager_ && host_averager_->is_due() && is_between_steps) average_hosts();
  if (can_compare_replicas() && reduction_ == Reduction::kNone) replicas_.check->on_step_end(num_reductions_);
}

void DistributedDataParallel::Impl::replace_buffer(const at::Tensor& buffer, const at::Tensor& tensor) {
  buffers_.replace(buffer, tensor);
  for (auto& [name, known] : all_tensors_)
    if (known.is_same(buffer)) known = tensor;
}

void DistributedDataParallel::Impl::check_join_allowed() const {
  if (host_averager_)
    throw UsageError("join: DdpOptions." +
                     (options_.average_hosts_every > 1
                          ? "average_hosts_every is " + std::to_string(options_.average_hosts_every) + "; expected 1"
                          : std::string("outer is set; expected none")) +
                     ", because hosts without batches would miss the averages of the others");
  if (optimizer_.has_sharded_state)
    throw UsageError(
        "join: the state of this model's optimizer is divided between the ranks (FusedOptions.shard_state), so a rank "
        "without batches could not update its shard",
        "disable shard_state, or give all ranks the same number of batches");
  if (optimizer_.host_reducer)
    throw UsageError(
        "join: the model has an optimizer of lockstep::optim and its ranks are on several hosts; expected one host",
        "use an optimizer of torch::optim");
}

void DistributedDataParallel::Impl::compare_replicas() {
  replicas_.compared_at = num_reductions_;
  if (can_compare_replicas()) replicas_.check->compare_now();
}

void DistributedDataParallel::Impl::consume(std::size_t index, const at::Tensor& reduced) {
  at::Tensor& gradient = parameters_[index].tensor.mutable_grad();
  const at::Tensor mean = parameters_[index].tensor.is_complex() ? at::view_as_complex(reduced) : reduced;
  const bool there = gradient.defined() && !gradient.is_sparse() && !mean.is_sparse() &&
                     gradient.const_data_ptr() == mean.const_data_ptr() && gradient.strides() == mean.strides();
  if (there) return;
  // After a backward() with create_graph the gradient keeps its graph, as it does where it is reduced in place: derived
  // once more and averaged, that graph gives the derivative of the mean. data(): the graph may have saved the gradient.
  if (gradient.defined() && gradient.requires_grad() && !gradient.is_sparse() && !mean.is_sparse()) {
    gradient.data().copy_(mean);
    return;
  }
  // detach(): a separate tensor on the same memory, so that the user's changes of its metadata do not affect `mean`.
  gradient = mean.is_sparse() ? mean : mean.detach();
}

void DistributedDataParallel::Impl::enter_no_sync() {
  if (optimizer_.updater)
    throw UsageError(
        "no_sync(): the optimizer updates parameters in backward() (update_in_backward()), so gradients do not "
        "accumulate",
        "disable update_in_backward()");
  ++no_sync_depth_;
}

void DistributedDataParallel::Impl::begin_shadow_reduction(bool divide_by_active) {
  comm::StepIdentity step{.stop_requested = comm::GroupAccess::step_identity(group_).stop_requested};
  step.joined = true;
  step.divide_by_active = divide_by_active;
  reducer_->begin(step, make_extra_ops(), nullptr);
}

bool DistributedDataParallel::Impl::finish_shadow_reduction() {
  /// Drops the means: this rank no longer trains.
  class DiscardSink final : public comm::GradientSink {
    void consume(std::size_t, const at::Tensor&) override {}
  } discard_sink;
  const at::NoGradGuard no_grad;
  const comm::Participation participation =
      keeps_local_gradients() ? in_place_reducer_->finish_fused(*optimizer_.sink) : reducer_->finish(discard_sink);
  if (participation.stop_requested) comm::GroupAccess::set_stop_agreed(group_);
  if (participation.active == 0) return false;
  buffers_.unpack(group_.size());
  join_.has_anyone_joined = true;
  join_.first_active_rank = participation.first_active;
  ++num_reductions_;
  return true;
}

std::optional<int> DistributedDataParallel::Impl::finish_join() {
  if (!std::exchange(join_.has_anyone_joined, false)) return std::nullopt;
  NamedTensors tensors = all_tensors_;
  for (auto& [name, tensor] : tensors) tensor = memory_of(tensor);
  broadcast_tensors(tensors, group_, join_.first_active_rank);
  replicas_.check->forget_step();
  const at::Tensor counts = at::empty({3}, at::kLong);
  auto* const values = counts.mutable_data_ptr<std::int64_t>();
  values[0] = group_.steps(), values[1] = optimizer_steps_, values[2] = local_backwards_;
  group_.broadcast(counts, join_.first_active_rank, {.name = "steps"});
  comm::GroupAccess::set_steps(group_, values[0]);
  optimizer_steps_ = values[1], local_backwards_ = values[2];
  return join_.first_active_rank;
}

DistributedDataParallel::DistributedDataParallel(nn::ModuleRef module, comm::Group group, DdpOptions options)
    : impl_(base::make_process_owned<Impl>(
          ModelTensors{.parameters = named_parameters(*module), .buffers = named_buffers(*module)},
          ModuleWatch(*module, options.ignore, options.buffers != BufferMode::kLocal), std::move(group), options)) {}
DistributedDataParallel::DistributedDataParallel(ModelTensors model, comm::Group group, DdpOptions options) {
  ModuleWatch watch(model, options.ignore, options.buffers != BufferMode::kLocal);
  impl_ = base::make_process_owned<Impl>(std::move(model), std::move(watch), std::move(group), std::move(options));
}
DistributedDataParallel::~DistributedDataParallel() {
  if (impl_) impl_->detach_module();
}
DistributedDataParallel::DistributedDataParallel(DistributedDataParallel&&) noexcept = default;
void DistributedDataParallel::average_hosts() { impl_->average_hosts(); }
void DistributedDataParallel::with_global_copy(const std::function<void()>& body) { impl_->with_global_copy(body); }
bool DistributedDataParallel::hosts_differ() const { return impl_->hosts_differ(); }
checkpoint::StateDict DistributedDataParallel::outer_state() const { return impl_->outer_state(); }
void DistributedDataParallel::load_outer_state(const checkpoint::StateDict& state) { impl_->load_outer_state(state); }
void DistributedDataParallel::replace_buffer(const at::Tensor& buffer, const at::Tensor& tensor) {
  impl_->replace_buffer(buffer, tensor);
}
void DistributedDataParallel::compare_replicas() { impl_->compare_replicas(); }
void DistributedDataParallel::count_optimizer_step() { impl_->count_optimizer_step(); }
const comm::Group& DistributedDataParallel::group() const { return impl_->group(); }
comm::ReducerStats DistributedDataParallel::stats() const { return impl_->stats(); }

DistributedDataParallel::operator std::shared_ptr<GradientSource>() const { return impl_; }

DistributedDataParallel::NoSync::NoSync(DistributedDataParallel& ddp) : ddp_(ddp) { ddp_.impl_->enter_no_sync(); }
DistributedDataParallel::NoSync::~NoSync() { ddp_.impl_->leave_no_sync(); }

}  // namespace lockstep::ddp
