#include "lockstep/train/optimizer_set.h"

#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::training {
namespace {

using base::UsageError;
using checkpoint::StateDict;

std::string numbered(const std::string& name, std::size_t number) {
  return number == 0 ? name : name + "_" + std::to_string(number);
}

constexpr const char* kBucketLayoutsPart = "buckets";  // bucket layout of each model

std::vector<std::string> saved_bucket_layouts(const TrainingState& training) {
  std::vector<std::string> layouts;
  if (!training.found()) return layouts;
  const StateDict state = training.read(kBucketLayoutsPart);
  for (std::size_t i = 0; i < state.size(); ++i)
    layouts.push_back(checkpoint::value_of<std::string>(state, std::to_string(i)));
  return layouts;
}

}  // namespace

OptimizerSet::OptimizerSet(comm::Group world, torch::nn::Module& module, const TrainerOptions& options,
                           const ConfigureOptimizers& configure, std::int64_t steps_per_epoch, std::int64_t total_steps,
                           const TrainingState& state)
    : world_(std::move(world)),
      module_(module),
      options_(options),
      precision_(amp::parse_precision(options.precision)),
      scaler_({.enabled = precision_.loss_scaling}) {
  if (precision_.master_weights) master_weights_.emplace(module.parameters());
  TrainingSetup setup(world_, module_, master_weights_ ? master_weights_->parameters() : module_.parameters(),
                      steps_per_epoch, total_steps, saved_bucket_layouts(state));
  for (OptimizerConfig& config : configure(setup)) {
    if (!config.optimizer) throw UsageError("configure_optimizers() returned a null optimizer; expected an optimizer");
    OptimizerEntry& entry = entries_.emplace_back();
    entry.optimizer = std::move(config.optimizer);
    entry.fused = dynamic_cast<optim::FusedOptimizer*>(entry.optimizer.get());
    if (entry.fused && master_weights_)
      throw UsageError(
          "configure_optimizers() returned an optimizer of lockstep::optim, which does not support the float32 master "
          "weights of precision " +
          options_.precision + "; expected an optimizer of torch for setup.parameters()");
    if (config.schedule) entry.scheduler.emplace(*entry.optimizer, std::move(config.schedule));
    entry.schedule_by_epoch = config.schedule_by_epoch;
    for (const auto& group : entry.optimizer->param_groups())
      entry.parameters.insert(entry.parameters.end(), group.params().begin(), group.params().end());
    optimizers_.push_back(entry.optimizer.get());
  }
  if (entries_.empty()) throw UsageError("configure_optimizers() returned no optimizer; expected at least one");
  models_ = setup.release_models();
  if (models_.empty()) {
    setup.ddp();
    models_ = setup.release_models();
  }
  if (master_weights_) master_weights_->copy_values_from_model();  // the model now has the values of rank 0
}

bool OptimizerSet::calls_group_step() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const OptimizerEntry& entry) { return entry.fused != nullptr; });
}

NamedValues OptimizerSet::learning_rates() const {
  NamedValues learning_rates;
  for (std::size_t i = 0; i < entries_.size(); ++i)
    learning_rates.emplace_back(numbered("lr", i), entries_[i].optimizer->param_groups().front().options().get_lr());
  return learning_rates;
}

OptimizerSet::ToggledOptimizer::ToggledOptimizer(const OptimizerSet& optimizer_set, std::size_t optimizer_index) {
  if (optimizer_set.size() == 1) return;
  std::vector<const void*> mine;
  for (const at::Tensor& parameter : optimizer_set.entries_[optimizer_index].parameters)
    mine.push_back(parameter.unsafeGetTensorImpl());
  for (std::size_t other = 0; other < optimizer_set.size(); ++other)
    for (const at::Tensor& parameter : optimizer_set.entries_[other].parameters)
      if (other != optimizer_index && parameter.requires_grad() &&
          std::find(mine.begin(), mine.end(), parameter.unsafeGetTensorImpl()) == mine.end()) {
        parameter.requires_grad_(false);
        frozen_.push_back(parameter);
      }
}

OptimizerSet::ToggledOptimizer::~ToggledOptimizer() {
  for (const at::Tensor& parameter : frozen_) parameter.requires_grad_(true);
}

void OptimizerSet::zero_grad(std::size_t optimizer_index) {
  entries_[optimizer_index].optimizer->zero_grad();
  if (master_weights_) module_.zero_grad();
}

void OptimizerSet::backward(at::Tensor loss, std::int64_t batches) {
  if (batches > 1) loss = loss / static_cast<double>(batches);
  scaler_.scale(loss).backward();
}

void OptimizerSet::update(std::size_t optimizer_index) {
  OptimizerEntry& entry = entries_[optimizer_index];
  if (master_weights_) master_weights_->copy_gradients_from_model();
  if (options_.clip_norm > 0 || options_.clip_value > 0) {
    if (precision_.loss_scaling) scaler_.unscale_(*entry.optimizer);
    if (options_.clip_norm > 0) optim::clip_grad_norm(*entry.optimizer, options_.clip_norm);
    if (options_.clip_value > 0) optim::clip_grad_value(*entry.optimizer, options_.clip_value);
  }
  const amp::StepResult made = scaler_.step(*entry.optimizer);
  // Reading `made` can synchronize with the device; without loss scaling no update is skipped.
  const bool has_stepped = !precision_.loss_scaling || made;
  if (has_stepped && master_weights_) master_weights_->copy_values_to_model();
  if (has_stepped && entry.scheduler && !entry.schedule_by_epoch) entry.scheduler->step();
}

void OptimizerSet::end_epoch() {
  for (OptimizerEntry& entry : entries_)
    if (entry.scheduler && entry.schedule_by_epoch) entry.scheduler->step();
}

/// The parameters of the module by name, or their master weights under the same names.
checkpoint::NamedParameters OptimizerSet::named_parameters() const {
  checkpoint::NamedParameters named;
  for (const auto& item : module_.named_parameters()) named.emplace_back(item.key(), item.value());
  if (master_weights_)
    for (std::size_t i = 0; i < named.size(); ++i) named[i].second = master_weights_->parameters()[i];
  return named;
}

/// A resumed training has the same optimizers. Their options are saved with the state of torch's optimizers only, and
/// the base rates with a schedule.
void OptimizerSet::add_settings_to(TrainingState& state) const {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const OptimizerEntry& entry = entries_[i];
    const std::string name = numbered("optimizer", i);
    const auto& optimizer = *entry.optimizer;
    state.add_setting(name, c10::demangle(typeid(optimizer).name()), SettingRule::kMustMatch);
    StateDict options = checkpoint::optimizer_options(optimizer);
    const StateDict schedule = entry.scheduler ? entry.scheduler->state_dict() : StateDict();
    for (auto& [key, value] : options) {
      const bool is_rate = key.ends_with(".lr") && entry.scheduler.has_value();
      if (is_rate) value = schedule.at("base_rate." + key.substr(6, key.size() - 9));  // "group.N.lr"
      state.add_setting(name + "." + key, value,
                        entry.fused && !is_rate ? SettingRule::kUsesNew : SettingRule::kUsesSaved);
    }
  }
}

void OptimizerSet::add_to(TrainingState& state) {
  add_settings_to(state);
  if (master_weights_)
    state.add("master", {.state_dict =
                             [this] {
                               StateDict weights;
                               for (const auto& [name, tensor] : named_parameters()) weights[name] = tensor;
                               return weights;
                             },
                         .load_state_dict =
                             [this](const StateDict& weights) {
                               const torch::NoGradGuard no_grad;
                               for (const auto& [name, tensor] : named_parameters())
                                 tensor.copy_(checkpoint::value_of<at::Tensor>(weights, name));
                             }});
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    OptimizerEntry& entry = entries_[i];
    if (entry.fused)
      state.add(numbered("optimizer", i), *entry.fused);
    else
      state.add(numbered("optimizer", i), *entry.optimizer, named_parameters());
    // A run may resume with a schedule that the previous run did not have, and without one that it had.
    state.add(numbered("schedule", i),
              {.state_dict = [&entry] { return entry.scheduler ? entry.scheduler->state_dict() : StateDict(); },
               .load_state_dict =
                   [&entry](const StateDict& schedule) {
                     if (entry.scheduler && !schedule.empty()) entry.scheduler->load_state_dict(schedule);
                   }});
  }
  state.add(kBucketLayoutsPart, {.state_dict =
                                     [this] {
                                       StateDict layouts;
                                       for (std::size_t i = 0; i < models_.size(); ++i)
                                         layouts[std::to_string(i)] = models_[i]->stats().layout;
                                       return layouts;
                                     },
                                 .load_state_dict = [](const StateDict&) {}});  // read at construction
  for (std::size_t i = 0; i < models_.size(); ++i)
    if (ddp::DistributedDataParallel& model = *models_[i]; model.hosts_differ())
      state.add(numbered("hosts", i),
                {.state_dict = [&model] { return model.outer_state(); },
                 .load_state_dict = [&model](const StateDict& saved) { model.load_outer_state(saved); },
                 .hosts_differ = true});
  state.add("scaler", scaler_);
}

}  // namespace lockstep::training
