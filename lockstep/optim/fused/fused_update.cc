// The passes of a fused optimizer: norms, updates, clipping, unscaling and state. FusedOptimizer forwards to them.
#include "lockstep/optim/fused/fused_update.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/captured_step.h"
#include "lockstep/optim/kernels/clip_grad.h"

namespace lockstep::optim::inline fused {
namespace {

using base::UsageError;
using comm::CapturedStep;

/// Null if state is not sharded, or if there is only one owner.
std::unique_ptr<StateSharding> make_shards(ddp::GradientSource& source, const FusedOptions& options) {
  if (!options.shard_state) return nullptr;
  auto shards = std::make_unique<StateSharding>(source);
  return shards->is_sharded() ? std::move(shards) : nullptr;
}

bool has_device_parameters(const ddp::GradientSource& source) {
  const auto all = source.parameters();
  return std::any_of(all.begin(), all.end(), [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); });
}

std::vector<at::Tensor> tensors_of(const ParameterStorage& storage) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : storage.parameters()) all.push_back(parameter.tensor);
  return all;
}

}  // namespace

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
void FusedOptimizer::skip_step() { update_->skip_step(); }

checkpoint::StateDict FusedOptimizer::state_dict() const { return update_->state_dict(); }
void FusedOptimizer::load_state_dict(const checkpoint::StateDict& state) { update_->load_state_dict(state); }

FusedUpdate::FusedUpdate(std::shared_ptr<ddp::GradientSource> source, UpdateRule& rule, const FusedOptions& options)
    : source_(std::move(source)),
      rule_(rule),
      foreach_(options.foreach || has_device_parameters(*source_)),
      attachment_(*source_, foreach_ ? nullptr : this),
      shards_(make_shards(*source_, options)),
      storage_(source_, rule.state_names().size(), rule.needs_norms() ? 2 : 1, attachment_.can_run_pass,
               shards_.get()) {
  if (foreach_) foreach_pass_.emplace(storage_, rule_, shards_ != nullptr);
  if (shards_) shards_->scatter_means();
  for (std::size_t index = 0; index < storage_.parameters().size() && rule_.initial_state() != 0; ++index)
    initialize_state(index);
}

at::Tensor FusedUpdate::step(const std::function<at::Tensor()>& closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  source_->require_outside_backward();
  if (updates_in_backward_) {
    source_->require_gradients_unchanged();
    updated_in_backward_ = false;
    source_->count_step();
    return loss;
  }
  if (CapturedStep* captured = foreach_pass_ ? CapturedStep::current() : nullptr) {
    step_captured(*captured);
    return loss;
  }
  check_not_scaled_twice();
  if (source_->num_backwards() != clip_.backward) clip_ = {};
  storage_.accept_writes();
  update_all(prepare());
  end_step();
  return loss;
}

bool FusedUpdate::step_unless_found_inf(const at::Tensor& found_inf) {
  if (!foreach_pass_ || updates_in_backward_) return false;  // with foreach, nothing is shared
  const std::uint64_t options_hash = prepare();
  if (!rule_.can_skip()) return false;
  found_inf_ = found_inf;
  const auto reset = c10::make_scope_exit([this] { found_inf_.reset(); });
  if (CapturedStep* captured = CapturedStep::current()) {
    step_captured(*captured);
    return true;
  }
  update_all(options_hash);
  end_step();
  return true;
}

void FusedUpdate::sync_step_counts() {
  if (foreach_pass_) foreach_pass_->sync_step_counts();
}

void FusedUpdate::skip_step() {
  source_->on_update_skipped();
  end_step();
}

void FusedUpdate::end_step() {
  clip_ = {};
  unscaling_.reset();
  source_->count_step();
}

double FusedUpdate::gradient_scale() const { return unscaling_ ? unscaling_->inverse * clip_.factor : clip_.factor; }

/// Throws UsageError if a backward() has added scaled gradients to unscaled ones.
void FusedUpdate::check_not_scaled_twice() {
  if (!unscaling_ || unscaling_->backward == source_->num_backwards()) return;
  unscaling_.reset();
  throw UsageError(
      "lockstep::optim: backward() was called after GradScaler::unscale_(), so scaled gradients were added to unscaled "
      "ones",
      "call zero_grad(), and call unscale_() after the last backward() of each step");
}

/// Begins an update and returns a hash of it.
std::uint64_t FusedUpdate::prepare() {
  storage_.require_same_layout();
  return fingerprint({gradient_scale(), clip_.max, std::bit_cast<double>(rule_.prepare())});
}

/// Sets a parameter's state to its initial value. If ranks share the memory, one of them writes it, before it takes
/// part in an update.
void FusedUpdate::initialize_state(std::size_t index) {
  for (const at::Tensor& state : storage_.states(index))
    if (storage_.is_primary()) state.fill_(rule_.initial_state());
}

void FusedUpdate::measure_norms(std::uint64_t options_hash) {
  run_norm_pass(true, options_hash);
  if (shards_) shards_->all_reduce_sums(storage_.all_partial_sums());
  for (std::size_t index = 0; index < has_sums_.size(); ++index) {
    kernels::SquaredNorms all{};
    for (std::size_t i = 0; has_sums_[index] && i < storage_.num_partial_sums(index); ++i) {
      all.parameter += storage_.partial_sums(index, 0)[i];
      all.step += storage_.partial_sums(index, 1)[i];
    }
    if (has_sums_[index]) rule_.set_norms(index, all);
  }
}

void FusedUpdate::update_in_backward(bool on) {
  if (on && rule_.needs_norms())
    throw UsageError(
        "update_in_backward(): this optimizer needs the norms of whole parameters and their gradients before the "
        "update",
        "disable update_in_backward()");
  if (on) storage_.require_unaliased();
  source_->update_in_backward(on ? this : nullptr);
  updates_in_backward_ = on;
  updated_in_backward_ = false;
  clip_ = {};
  unscaling_.reset();
}

std::uint64_t FusedUpdate::begin_update() {
  if (updated_in_backward_)
    throw UsageError(
        "backward(): an earlier backward() has updated parameters (update_in_backward()), and step() has not been "
        "called since",
        "call step() after each backward(), or disable update_in_backward() to accumulate gradients");
  storage_.require_unwritten();
  return options_hash_ = prepare();
}

void FusedUpdate::end_update(bool consumed_chunks) {
  if (!consumed_chunks) update_all(options_hash_);
  updated_in_backward_ = true;
}

void FusedUpdate::average_gradients() {
  if (updates_in_backward_)
    throw UsageError("average_gradients(): backward() has already updated parameters (update_in_backward())",
                     "disable update_in_backward()");
  check_not_scaled_twice();
  source_->average_gradients();
  if (!unscaling_) return;
  const at::NoGradGuard no_grad;
  for (const auto& parameter : storage_.parameters())
    if (parameter.tensor.grad().defined()) parameter.tensor.mutable_grad().mul_(unscaling_->inverse);
  unscaling_.reset();
}

amp::UnscaleResult FusedUpdate::unscale(const at::Tensor& inverse_scale) {
  if (updates_in_backward_)
    throw UsageError(
        "GradScaler: backward() updates parameters before all gradients are known to be finite (update_in_backward())",
        "disable update_in_backward()");
  if (clip_.requested && clip_.backward == source_->num_backwards())
    throw UsageError(
        "GradScaler::unscale_(): clip_grad_norm() or clip_grad_value() has been called before, on scaled gradients",
        "call unscale_() before gradients are clipped");
  unscaling_.reset();
  if (!source_->has_local_gradients()) return amp::UnscaleResult::kUnscaleInPlace;
  storage_.require_same_layout();
  const double sum = sum_squared_gradients();
  if (std::find(has_sums_.begin(), has_sums_.end(), true) == has_sums_.end()) return amp::UnscaleResult::kNoGradients;
  unscaling_ = {inverse_scale.item<double>(), source_->num_backwards(), sum};
  return std::isfinite(sum) ? amp::UnscaleResult::kFinite : amp::UnscaleResult::kNonFinite;
}

/// Throws UsageError if `call` cannot clip the gradients of the last backward().
void FusedUpdate::require_clippable(const std::string& call) const {
  if (updates_in_backward_)
    throw UsageError(call + "(): backward() has already updated parameters (update_in_backward())",
                     "disable update_in_backward()");
  storage_.require_same_layout();
}

at::Tensor FusedUpdate::clip_grad_norm(double max_norm) {
  base::check_option(max_norm > 0, "clip_grad_norm", "max_norm", max_norm, "more than 0");
  require_clippable("clip_grad_norm");
  if (foreach_pass_) return kernels::clip_norm(tensors_of(storage_), max_norm);
  check_not_scaled_twice();
  if (clip_.backward != source_->num_backwards()) clip_ = {};
  if (std::isfinite(clip_.max))
    throw UsageError(
        "clip_grad_norm(): clip_grad_value() has been called before, so the norm would be of unclamped values",
        "call clip_grad_norm() before clip_grad_value()");
  // Local gradients cannot have changed since unscale(): step() would throw.
  const double norm =
      unscaling_ ? std::sqrt(unscaling_->squared_norm) * unscaling_->inverse : std::sqrt(sum_squared_gradients());
  const double coefficient = max_norm / (norm + kernels::kClipEpsilon);
  clip_ = {.factor = coefficient > 1 ? 1 : coefficient, .backward = source_->num_backwards(), .requested = true};
  return at::scalar_tensor(norm, at::kDouble);
}

void FusedUpdate::clip_grad_value(double max) {
  base::check_option(max > 0, "clip_grad_value", "max", max, "more than 0");
  require_clippable("clip_grad_value");
  if (foreach_pass_) return kernels::clip_value(tensors_of(storage_), max);
  check_not_scaled_twice();
  if (clip_.backward != source_->num_backwards()) clip_ = {};
  clip_.max = std::min(clip_.max, max);
  clip_.backward = source_->num_backwards();
  clip_.requested = true;
}

/// The sum of squares of all gradients, computed in one pass.
double FusedUpdate::sum_squared_gradients() {
  run_norm_pass(false, 0);
  if (has_partial_means()) shards_->all_reduce_sums(storage_.all_partial_sums());
  double sum = 0;
  for (std::size_t index = 0; index < has_sums_.size(); ++index)
    for (std::size_t i = 0; has_sums_[index] && i < storage_.num_partial_sums(index); ++i)
      sum += storage_.partial_sums(index)[i];
  return sum;
}

/// Runs a pass that changes nothing and sums squares: of gradients, or what rule_.measure_norms() returns.
void FusedUpdate::run_norm_pass(bool measures_norms, std::uint64_t options_hash) {
  has_sums_.assign(storage_.parameters().size(), false);
  measuring_norms_ = measures_norms;
  gradient_use_ = comm::GradientUse::kNorm;
  const auto reset = c10::make_scope_exit([this] {
    gradient_use_ = comm::GradientUse::kUpdate;  // for other ranks' updates after join()
  });
  const at::NoGradGuard no_grad;
  attachment_.can_run_pass ? source_->run_pass(gradient_use_, options_hash, *this) : run_local_pass();
}

void FusedUpdate::update_all(std::uint64_t options_hash) {
  const at::NoGradGuard no_grad;
  if (rule_.needs_norms() && !foreach_pass_) measure_norms(options_hash);
  if (attachment_.can_run_pass)
    source_->run_pass(comm::GradientUse::kUpdate, options_hash, *this);
  else if (foreach_pass_)
    for (const std::size_t index : foreach_pass_->update(found_inf_)) rule_.on_updated(index, storage_.states(index));
  else
    run_local_pass();
  if (shards_) shards_->all_gather_parameters(options_hash, storage_);
  source_->on_parameters_updated();
}

/// Runs the pass over the gradients in this rank's memory, which backward() has averaged, at least in the shard.
void FusedUpdate::run_local_pass() {
  if (has_partial_means()) source_->require_gradients_unchanged();
  const auto& parameters = storage_.parameters();
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    const at::Tensor& tensor = parameters[index].tensor;
    // run_pass() has nothing for parameters without elements.
    if (!tensor.grad().defined() || tensor.numel() == 0) continue;
    const at::Tensor gradient = storage_.dense_gradient(index);
    const void* data = gradient.const_data_ptr();
    const auto count = static_cast<std::size_t>(tensor.numel());
    consume({.gradient_index = index, .count = count, .gradients = &data, .num_gradients = 1});
    finish_gradient(index);
  }
}

FusedUpdate::RangeArgs::RangeArgs(const FusedUpdate& update, const comm::GradientChunk& chunk, std::size_t first,
                                  std::size_t end) {
  const ParameterStorage& storage = update.storage_;
  const at::Tensor& tensor = storage.parameters()[chunk.gradient_index].tensor;
  const bool raw_gradients = update.gradient_use_ == comm::GradientUse::kNorm && !update.measuring_norms_;
  if (!raw_gradients || update.has_partial_means()) {
    const ElementRange shard = storage.shard_of(chunk.gradient_index);
    first = std::max(first, shard.first);
    end = std::min(end, shard.first + shard.count);
    if (first >= end) return;
    for (const at::Tensor& state : storage.states(chunk.gradient_index))
      states.push_back(static_cast<char*>(state.mutable_data_ptr()) + (first - shard.first) * state.element_size());
  }
  for (std::size_t i = 0; i < chunk.num_gradients; ++i)
    gradients.push_back(static_cast<const char*>(chunk.gradients[i]) + (first - chunk.offset) * tensor.element_size());
  kernel = {.dtype = tensor.scalar_type(),
            .gradients = gradients.data(),
            .num_gradients = gradients.size(),
            .divisor = static_cast<double>(chunk.divisor),
            .scale = raw_gradients ? 1 : update.gradient_scale(),
            .max = raw_gradients ? std::numeric_limits<double>::infinity() : update.clip_.max,
            .parameter = storage.memory_of(chunk.gradient_index) + first * tensor.element_size(),
            .states = states.data(),
            .count = end - first};
}

void FusedUpdate::measure(const comm::GradientChunk& chunk) {
  const std::size_t stop = chunk.offset + chunk.count;
  for (std::size_t first = chunk.offset; first < stop; first += ParameterStorage::kElementsPerSum) {
    const std::size_t place = first / ParameterStorage::kElementsPerSum;
    const std::size_t end = std::min(first + ParameterStorage::kElementsPerSum, stop);
    const RangeArgs range(*this, chunk, first, end);
    if (!measuring_norms_) {
      storage_.partial_sums(chunk.gradient_index)[place] =
          range.kernel.count > 0 ? kernels::kernels().sum_of_squares(range.kernel) : 0;
      continue;
    }
    kernels::SquaredNorms squares{};
    if (range.kernel.count > 0) squares = rule_.measure_norms(chunk.gradient_index, range.kernel);
    storage_.partial_sums(chunk.gradient_index, 0)[place] = squares.parameter;
    storage_.partial_sums(chunk.gradient_index, 1)[place] = squares.step;
  }
}

void FusedUpdate::finish_gradient(std::size_t index) {
  if (gradient_use_ == comm::GradientUse::kNorm) {
    has_sums_[index] = true;
    return;
  }
  rule_.on_updated(index, storage_.states(index));
  // A graph that needs the old values fails instead of using the new ones.
  torch::autograd::impl::bump_version(storage_.parameters()[index].tensor);
}

void FusedUpdate::change_parameters(const std::function<void()>& change) {
  storage_.require_same_layout();
  storage_.change(change);
}

void FusedUpdate::import_loaded_state() {
  const at::NoGradGuard no_grad;
  if (foreach_pass_) foreach_pass_->reset_step_counts();
  std::vector<std::vector<at::Tensor>> loaded;
  std::string misshapen;  // all are checked before any is copied
  for (std::size_t index = 0; index < storage_.parameters().size(); ++index) {
    loaded.push_back(rule_.states(index));
    for (std::size_t i = 0; i < loaded[index].size(); ++i) {
      at::Tensor& state = loaded[index][i];
      if (state.defined() && state.is_same(storage_.states(index)[i])) state.reset();
      if (state.defined() && state.sizes() != storage_.parameters()[index].tensor.sizes())
        misshapen = rule_.state_names()[i] + " of " + storage_.parameters()[index].name;
    }
    if (rule_.steps(index) > 0) rule_.set_states(index, rule_.steps(index), storage_.states(index));
  }
  if (!misshapen.empty())
    throw UsageError("lockstep::optim: the loaded " + misshapen +
                         " has another shape than its parameter; only the step counts have been loaded",
                     shards_
                         ? "use state_dict() and load_state_dict(), because an archive that torch saves contains only "
                           "this rank's shard"
                         : "");
  for (std::size_t index = 0; index < loaded.size(); ++index)
    for (std::size_t i = 0; i < loaded[index].size(); ++i)
      if (loaded[index][i].defined()) storage_.set_state(index, i, loaded[index][i]);
}

checkpoint::StateDict FusedUpdate::state_dict() {
  sync_step_counts();
  checkpoint::StateDict all;
  for (std::size_t index = 0; index < storage_.parameters().size(); ++index) {
    if (rule_.steps(index) == 0) continue;
    const std::string& name = storage_.parameters()[index].name;
    all[name + ".step"] = at::scalar_tensor(rule_.steps(index), at::kLong);
    for (std::size_t i = 0; i < storage_.states(index).size(); ++i)
      all[name + "." + rule_.state_names()[i]] =
          shards_ ? shards_->gather_state(index, storage_.states(index)[i]) : storage_.states(index)[i].detach();
  }
  return all;
}

void FusedUpdate::load_state_dict(const checkpoint::StateDict& state) {
  std::map<std::string, at::Tensor> left;
  for (const auto& [name, value] : state) left.emplace(name, checkpoint::value_of<at::Tensor>(state, name));
  const auto take_tensor = [&](const std::string& name, at::IntArrayRef sizes) {
    const auto found = left.find(name);
    if (found == left.end()) throw UsageError("load_state_dict: \"" + name + "\" is missing");
    if (found->second.sizes() != sizes)
      throw UsageError("load_state_dict: \"" + name + "\" has " + std::to_string(found->second.numel()) +
                       " elements in another shape than expected");
    return left.extract(found).mapped();
  };
  struct Loaded {
    std::int64_t steps = 0;
    std::vector<at::Tensor> states;
  };
  std::vector<Loaded> loaded;  // checked completely before anything changes
  for (const auto& [name, tensor] : storage_.parameters()) {
    auto& [steps, states] = loaded.emplace_back();
    if (!left.contains(name + ".step")) continue;
    steps = take_tensor(name + ".step", {}).item<std::int64_t>();
    for (const std::string& kind : rule_.state_names())
      states.push_back(take_tensor(name + "." + kind, tensor.sizes()));
  }
  if (!left.empty())
    throw UsageError("load_state_dict: \"" + left.begin()->first + "\" does not belong to a parameter; " +
                     std::to_string(left.size()) + " names are unexpected");
  const at::NoGradGuard no_grad;
  source_->host_group().barrier({.name = "load_state_dict"});
  for (std::size_t index = 0; index < loaded.size(); ++index) {
    for (std::size_t i = 0; storage_.is_primary() && i < loaded[index].states.size(); ++i)
      storage_.set_state(index, i, loaded[index].states[i]);
    if (loaded[index].steps == 0) initialize_state(index);
    rule_.set_states(index, loaded[index].steps, storage_.states(index));
  }
  if (foreach_pass_) foreach_pass_->reset_step_counts();
  source_->host_group().barrier({.name = "load_state_dict"});
}

}  // namespace lockstep::optim::inline fused
