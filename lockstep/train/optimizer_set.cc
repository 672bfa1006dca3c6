#include "lockstep/train/optimizer_set.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/optim/kernels/clip_grad.h"
#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::train {
namespace {

using base::UsageError;
using checkpoint::StateDict;

std::string numbered(const std::string& name, std::size_t number) {
  return number == 0 ? name : name + "_" + std::to_string(number);
}

constexpr const char* kBuckets = "buckets";  // how gradients travelled, of each model

std::vector<std::string> layouts_in(const checkpoint::SavedCheckpoint& saved) {
  const StateDict state = saved.read(kBuckets);
  std::vector<std::string> layouts;
  for (std::size_t i = 0; i < state.size(); ++i)
    layouts.push_back(checkpoint::value_of<std::string>(state, std::to_string(i)));
  return layouts;
}

}  // namespace

Updaters::Updaters(comm::Group world, torch::nn::Module& module, const TrainerOptions& options,
                   const ConfigureOptimizers& configure, std::int64_t steps_per_epoch, std::int64_t total_steps,
                   const std::optional<checkpoint::SavedCheckpoint>& found)
    : world_(std::move(world)),
      module_(module),
      options_(options),
      precision_(amp::parse_precision(options.precision)),
      scaler_({.enabled = precision_.loss_scaling}) {
  if (precision_.master_weights) master_.emplace(module.parameters());
  TrainingSetup setup(world_, module_, master_ ? master_->parameters() : module_.parameters(), steps_per_epoch,
                      total_steps, found ? layouts_in(*found) : std::vector<std::string>());
  for (OptimizerPlan& plan : configure(setup)) {
    if (!plan.optimizer) throw UsageError("configure_optimizers() gave a null optimizer; allowed are optimizers");
    Updater& updater = updaters_.emplace_back();
    updater.optimizer = std::move(plan.optimizer);
    updater.fused = dynamic_cast<optim::FusedOptimizer*>(updater.optimizer.get());
    if (updater.fused && master_)
      throw UsageError("precision " + options_.precision +
                       " has copies in float32 of the weights, which an optimizer of lockstep::optim does not know; "
                       "allowed are optimizers of torch of setup.parameters()");
    if (plan.schedule) updater.scheduler.emplace(*updater.optimizer, std::move(plan.schedule));
    updater.schedule_by_epoch = plan.schedule_by_epoch;
    for (const auto& group : updater.optimizer->param_groups())
      updater.parameters.insert(updater.parameters.end(), group.params().begin(), group.params().end());
    optimizers_.push_back(updater.optimizer.get());
  }
  if (updaters_.empty()) throw UsageError("configure_optimizers() gave no optimizer; allowed is one or more");
  models_ = setup.take();
  if (models_.empty()) {
    setup.ddp();
    models_ = setup.take();
  }
  if (master_) master_->take_values();  // those of rank 0, now
}

bool Updaters::end_steps() const {
  return std::any_of(updaters_.begin(), updaters_.end(),
                     [](const Updater& updater) { return updater.fused != nullptr; });
}

NamedValues Updaters::rates() const {
  NamedValues rates;
  for (std::size_t i = 0; i < updaters_.size(); ++i)
    rates.emplace_back(numbered("lr", i), updaters_[i].optimizer->param_groups().front().options().get_lr());
  return rates;
}

Updaters::Turn::Turn(const Updaters& updaters, std::size_t turn) {
  if (updaters.size() == 1) return;
  std::vector<const void*> mine;
  for (const at::Tensor& parameter : updaters.updaters_[turn].parameters)
    mine.push_back(parameter.unsafeGetTensorImpl());
  for (std::size_t other = 0; other < updaters.size(); ++other)
    for (const at::Tensor& parameter : updaters.updaters_[other].parameters)
      if (other != turn && parameter.requires_grad() &&
          std::find(mine.begin(), mine.end(), parameter.unsafeGetTensorImpl()) == mine.end()) {
        parameter.requires_grad_(false);
        held_.push_back(parameter);
      }
}

Updaters::Turn::~Turn() {
  for (const at::Tensor& parameter : held_) parameter.requires_grad_(true);
}

void Updaters::zero_grad(std::size_t turn) {
  updaters_[turn].optimizer->zero_grad();
  if (master_) module_.zero_grad();
}

void Updaters::backward(at::Tensor loss, std::int64_t batches) {
  if (batches > 1) loss = loss / static_cast<double>(batches);
  scaler_.scale(loss).backward();
}

void Updaters::update(std::size_t turn) {
  Updater& updater = updaters_[turn];
  if (master_) master_->take_gradients();
  if (options_.clip_norm > 0 || options_.clip_value > 0) {
    if (precision_.loss_scaling) scaler_.unscale_(*updater.optimizer);
    clip(updater);
  }
  const amp::StepMade made = scaler_.step(*updater.optimizer);
  // Nobody waits for the device to know, where no scale can be too large.
  const bool moved = !precision_.loss_scaling || made;
  if (moved && master_) master_->give_values();
  if (moved && updater.scheduler && !updater.schedule_by_epoch) updater.scheduler->step();
}

void Updaters::end_epoch() {
  for (Updater& updater : updaters_)
    if (updater.scheduler && updater.schedule_by_epoch) updater.scheduler->step();
}

void Updaters::clip(Updater& updater) const {
  if (updater.fused) {
    if (options_.clip_norm > 0) updater.fused->clip_grad_norm(options_.clip_norm);
    if (options_.clip_value > 0) updater.fused->clip_grad_value(options_.clip_value);
  } else {
    if (options_.clip_norm > 0) optim::clip_grad_norm(updater.parameters, options_.clip_norm);
    if (options_.clip_value > 0) optim::clip_grad_value(updater.parameters, options_.clip_value);
  }
}

// The module's, or the copies in their place under their names.
std::vector<std::pair<std::string, at::Tensor>> Updaters::named_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& item : module_.named_parameters()) named.emplace_back(item.key(), item.value());
  if (master_)
    for (std::size_t i = 0; i < named.size(); ++i) named[i].second = master_->parameters()[i];
  return named;
}

void Updaters::add_to(checkpoint::Parts& parts) const {
  for (std::size_t i = 0; i < updaters_.size(); ++i) {
    const Updater& updater = updaters_[i];
    StateDict state;
    if (updater.fused) {
      for (auto& [name, tensor] : updater.fused->state_dict(/*copies=*/false)) state[name] = std::move(tensor);
    } else {
      state = checkpoint::optimizer_state_dict(*updater.optimizer, named_parameters());
    }
    if (world_.rank() != 0) continue;
    parts[numbered("optimizer", i)] = std::move(state);
    StateDict& schedule = parts[numbered("schedule", i)];
    if (!updater.scheduler) continue;
    const optim::Scheduler::Position position = updater.scheduler->position();
    schedule["step"] = position.step;
    for (std::size_t group = 0; group < position.base_rates.size(); ++group)
      schedule["base_rate." + std::to_string(group)] = position.base_rates[group];
  }
  if (world_.rank() != 0) return;
  StateDict& layouts = parts[kBuckets];
  for (std::size_t i = 0; i < models_.size(); ++i) layouts[std::to_string(i)] = models_[i]->stats().layout;
  parts["scaler"] = {{"state", to_json(scaler_.state_dict())}};
  if (master_)
    for (const auto& [name, tensor] : named_parameters()) parts["master"][name] = tensor;
}

void Updaters::load(const checkpoint::SavedCheckpoint& saved) {
  if (master_) {
    const StateDict copies = saved.read("master");
    const torch::NoGradGuard no_grad;
    for (const auto& [name, tensor] : named_parameters()) tensor.copy_(checkpoint::value_of<at::Tensor>(copies, name));
  }
  for (std::size_t i = 0; i < updaters_.size(); ++i) {
    Updater& updater = updaters_[i];
    const StateDict state = saved.read(numbered("optimizer", i));
    if (updater.fused) {
      std::vector<std::pair<std::string, at::Tensor>> tensors;
      for (const auto& [name, value] : state) tensors.emplace_back(name, checkpoint::value_of<at::Tensor>(state, name));
      updater.fused->load_state_dict(tensors);
    } else {
      checkpoint::load_optimizer_state_dict(*updater.optimizer, named_parameters(), state);
    }
    const StateDict schedule = saved.read(numbered("schedule", i));
    if (!updater.scheduler || schedule.empty()) continue;
    optim::Scheduler::Position position{.step = checkpoint::value_of<std::int64_t>(schedule, "step")};
    for (std::size_t group = 0; group + 1 < schedule.size(); ++group)
      position.base_rates.push_back(checkpoint::value_of<double>(schedule, "base_rate." + std::to_string(group)));
    updater.scheduler->resume(position);
  }
  scaler_.load_state_dict(
      amp::scaler_state_from_json(checkpoint::value_of<std::string>(saved.read("scaler"), "state")));
}

}  // namespace lockstep::train
