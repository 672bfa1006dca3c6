#include "lockstep/train/fit_loop.h"

#include <ATen/Context.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <type_traits>
#include <typeinfo>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/data/seed.h"
#include "lockstep/nn/module_summary.h"
#include "lockstep/nn/sync_batch_norm.h"
#include "lockstep/optim/ema.h"
#include "lockstep/train/checkpoint_manager.h"
#include "lockstep/train/loggers/record_file.h"
#include "lockstep/train/optimizer_set.h"
#include "lockstep/train/training_reporter.h"

namespace lockstep::training {
namespace {

using base::UsageError;
using checkpoint::StateDict;
using checkpoint::value_of;

constexpr const char* kStopReasonTexts[] = {"all epochs completed", "max_steps", "max_time", "stop requested",
                                            "stopped by a callback"};  // indexed by StopReason

// Names of the parts of a checkpoint.
constexpr const char* kRankPart = "rank";         // one per rank
constexpr const char* kUserPartPrefix = "user-";  // one per rank, followed by the registered name

/// Returns the unqualified class name, such as "EarlyStopping", as part of a file name.
std::string class_name(const std::type_info& type) {
  std::string text = c10::demangle(type.name());
  text = text.substr(text.rfind(':') + 1);
  for (char& c : text)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') c = '-';
  return text.substr(0, 40);
}

class FitLoop final : public FitContext {
 public:
  FitLoop(comm::Group world, const TrainerOptions& options, FitComponents components)
      : world_(std::move(world)),
        options_(options),
        components_(std::move(components)),
        precision_(amp::parse_precision(options.precision)),
        plan_(plan_epoch(options_, components_.train->batches_per_epoch(),
                         components_.val ? components_.val->batches_per_epoch() : 0)),
        checkpoint_manager_(world_, options_, components_.fit_number) {
    prepare_module();
    optimizer_set_.emplace(world_, components_.module, options_, components_.configure_optimizers, plan_.steps,
                           total_steps(), state());
    if (options_.ema > 0) ema_.emplace(components_.module, optim::EmaOptions{.decay = options_.ema});
    resume_training();
    reporter_.emplace(world_, options_,
                      ReporterOptions{.folder = checkpoint_manager_.folder(),
                                      .step = progress_.step,
                                      .steps_per_epoch = plan_.steps,
                                      .num_epochs = std::max<std::int64_t>(1, num_epochs()),
                                      .is_resumed = state().found().has_value()});
  }

  FitResult run() {
    world_.stop_requested();  // from now on, a stop signal only sets a stop request, which the next step reads
    if (options_.model_summary && world_.rank() == 0)
      std::fputs(nn::module_summary(components_.module).c_str(), stdout), std::fflush(stdout);
    for (const auto& callback : components_.callbacks) callback->on_fit_start(*this);
    add_user_and_rank_state();
    if (!state().found() && components_.val && plan_.val_batches > 0 && options_.num_sanity_val_steps > 0)
      validate(world_, components_.module, *components_.val,
               std::min<std::int64_t>(options_.num_sanity_val_steps, plan_.val_batches), precision_, {});
    reporter_->resume_step_timing();
    if (plan_.steps > 0 && (options_.max_steps < 0 || progress_.step < options_.max_steps))
      while (!stop_reason_ && (options_.max_epochs < 0 || progress_.epoch < options_.max_epochs)) run_epoch();
    result_.reason = stop_reason_.value_or(StopReason::kCompleted);
    for (const auto& model : optimizer_set_->models()) model->compare_replicas();
    if (progress_.step > 0 && checkpoint_manager_.should_save_at_end(progress_.step)) save(/*durable=*/true);
    checkpoint_manager_.wait_for_save();
    for (const auto& callback : components_.callbacks) callback->on_fit_end(*this, result_.reason);
    reporter_->finish(progress_.step, kStopReasonTexts[static_cast<int>(result_.reason)]);
    result_.epochs = progress_.epoch;
    result_.steps = progress_.step;
    result_.train_values = progress_.train_values;
    result_.val_values = progress_.val_values;
    result_.folder = checkpoint_manager_.folder();
    return std::move(result_);
  }

  comm::Group& world() override { return world_; }
  torch::nn::Module& module() override { return components_.module; }
  const std::vector<torch::optim::Optimizer*>& optimizers() const override { return optimizer_set_->optimizers(); }
  std::int64_t epoch() const override { return progress_.epoch; }
  std::int64_t step() const override { return progress_.step; }
  const std::string& folder() const override { return checkpoint_manager_.folder(); }
  LoggerCollection& loggers() override { return reporter_->loggers(); }
  void stop(StopReason reason) override {
    if (!stop_reason_) stop_reason_ = reason;
  }
  bool save_weights(const std::string& path) override {
    return with_averages([&] {
      return checkpoint_manager_.write_on_rank_0("save weights to " + path, [&] {
        create_parent_directories(path);
        checkpoint::save(components_.module, path);
      });
    });
  }

 private:
  std::int64_t num_epochs() const {
    if (options_.max_epochs >= 0) return options_.max_epochs;
    return options_.max_steps >= 0 && plan_.steps > 0 ? (options_.max_steps + plan_.steps - 1) / plan_.steps : 1;
  }
  std::int64_t total_steps() const {
    const std::int64_t by_epochs = options_.max_epochs >= 0 ? options_.max_epochs * plan_.steps : -1;
    if (options_.max_steps < 0 || by_epochs < 0) return std::max(options_.max_steps, by_epochs);
    return std::min(options_.max_steps, by_epochs);
  }

  void prepare_module() {
    torch::nn::Module& module = components_.module;
    if (options_.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    if (options_.sync_batch_norm) nn::convert_sync_batch_norm(module, world_);
    amp::cast(module, precision_);
    module.to(world_.device());
    if (!module.is_training()) module.train();
    if (components_.val) require_exact_sharding(*components_.val);
  }

  void run_epoch() {
    components_.train->begin_epoch(data_epoch());
    // Above 0 when the training resumes inside an epoch, possibly with a different number of ranks.
    const std::int64_t first =
        std::min(plan_.train_batches, components_.train->batches_per_epoch() - components_.train->batches_this_epoch());
    EpochPlan plan = plan_;
    plan.train_batches -= first;
    std::int64_t index = first;
    progress_.in_epoch = true;
    validate_if_due();  // when the previous run stopped just before a validation
    while (index < plan_.train_batches && !stop_reason_ && next_batch()) {
      const std::int64_t batch = index++;
      train_batch(batch, plan, batch - first);
      progress_.validation_due |= plan_.should_validate_after(progress_.epoch, batch);
      if (!plan.is_step_end(batch - first)) continue;
      end_step();
      validate_if_due();
      if (!stop_reason_ && index < plan_.train_batches && checkpoint_manager_.should_save_after_step(progress_.step))
        save(/*durable=*/false);
    }
    components_.train->end_epoch();
    log_metrics();
    progress_.train_values = mean_over_ranks(progress_.epoch_metrics, world_);
    if (index < plan_.train_batches || progress_.validation_due) return;  // the epoch is not finished
    optimizer_set_->end_epoch();
    for (const auto& callback : components_.callbacks) callback->on_epoch_end(*this);
    progress_.epoch_metrics.clear();
    progress_.in_epoch = false;
    ++progress_.epoch;
    if (checkpoint_manager_.should_save_after_epoch(progress_.epoch) ||
        checkpoint_manager_.should_save_after_step(progress_.step))
      save(/*durable=*/false);
    reporter_->resume_step_timing();
  }

  /// The epoch that determines the order of the samples.
  std::uint64_t data_epoch() const {
    return options_.overfit_batches == CountOrFraction(0) ? static_cast<std::uint64_t>(progress_.epoch) : 0;
  }

  bool next_batch() {
    const auto scope = reporter_->timer().enter(Phase::kData);
    return components_.train->fetch_next();
  }

  /// Forward and backward of one batch, for each optimizer in turn. `plan_index`: the number of the batch in `plan`.
  void train_batch(std::int64_t index, const EpochPlan& plan, std::int64_t plan_index) {
    const bool first = plan_index % plan.accumulate_grad_batches == 0, last = plan.is_step_end(plan_index);
    if (precision_.weights != at::kFloat) components_.train->cast_batch(precision_.weights);
    std::list<ddp::DistributedDataParallel::NoSync> no_sync_guards;
    if (!last)
      for (const auto& model : optimizer_set_->models()) no_sync_guards.emplace_back(*model);
    const std::int64_t samples = components_.train->num_samples();
    num_samples_ += samples;
    for (std::size_t optimizer_index = 0; optimizer_index < optimizer_set_->size(); ++optimizer_index) {
      const OptimizerSet::ToggledOptimizer toggled(*optimizer_set_, optimizer_index);
      if (first) optimizer_set_->zero_grad(optimizer_index);
      StepLog log(progress_.unlogged_metrics, "");
      log.epoch = progress_.epoch;
      log.batch = index;
      log.step = progress_.step;
      log.num_samples = samples;
      log.optimizer = static_cast<int>(optimizer_index);
      backward(forward(log), plan.batches_in_step(plan_index));
      if (!last) continue;
      const auto scope = reporter_->timer().enter(Phase::kOptimizer);
      optimizer_set_->update(optimizer_index);
    }
    if (last) optimizer_set_->end_step();
    for (const std::string& name : progress_.unlogged_metrics.take_non_finite_names())
      if (warned_names_.insert(name).second)
        base::log_warning(
            "NONFINITE " + name + " is infinite or NaN on rank " + std::to_string(world_.rank()) + " since " +
            describe_batch("training_step()", {progress_.epoch, index, progress_.step}, *components_.train));
  }

  at::Tensor forward(StepLog& log) {
    const auto scope = reporter_->timer().enter(Phase::kForward);
    std::optional<amp::Autocast> autocast;
    if (precision_.autocast)
      autocast.emplace(amp::AutocastOptions{.device = world_.device().type(), .dtype = precision_.autocast});
    const at::Tensor loss = components_.train->run_step("training_step()", log);
    if (!loss.defined())
      throw UsageError("training_step() returned an undefined tensor; expected a loss of one element");
    log.log(log.optimizer == 0 ? "loss" : "loss_" + std::to_string(log.optimizer), loss);
    return loss;
  }

  /// Takes ownership of the loss, so that its graph is freed before the update.
  void backward(at::Tensor loss, std::int64_t batches) {
    const auto scope = reporter_->timer().enter(Phase::kBackward);
    optimizer_set_->backward(std::move(loss), batches);
  }

  void end_step() {
    if (ema_) ema_->update();
    if (!optimizer_set_->calls_group_step()) world_.step();
    ++progress_.step;
    for (const auto& callback : components_.callbacks) callback->on_step(*this);
    reporter_->record_step(progress_.step, std::exchange(num_samples_, 0), last_logged_);
    if (progress_.step % options_.log_every_n_steps == 0) log_metrics();
    checkpoint_manager_.check_in_flight_save();
    if (options_.max_steps >= 0 && progress_.step >= options_.max_steps) stop(StopReason::kMaxSteps);
    if (options_.max_time.count() > 0 && is_out_of_time()) stop(StopReason::kMaxTime);
    if (world_.stop_requested()) stop(StopReason::kStopRequested);
  }

  double seconds() const {
    return progress_.seconds + std::chrono::duration<double>(std::chrono::steady_clock::now() - start_time_).count();
  }

  /// Returns whether max_time has passed on rank 0's clock. Collective about once a second: rank 0 broadcasts the
  /// number of steps until the next check.
  bool is_out_of_time() {
    if (progress_.step < next_time_check_) return false;
    const double passed = seconds(), limit = static_cast<double>(options_.max_time.count());
    const double each = passed / static_cast<double>(progress_.step),
                 pause = std::min(1.0, std::max(0.0, limit - passed));
    const std::int64_t steps =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(pause / std::max(each, 1e-6)), 1, 100000);
    const std::int64_t answer = std::stoll(world_.broadcast_bytes(passed >= limit ? "0" : std::to_string(steps), 0));
    next_time_check_ = progress_.step + answer;
    return answer == 0;
  }

  /// Logs means over all ranks since the previous call. Collective.
  void log_metrics() {
    if (progress_.unlogged_metrics.empty()) return;
    Metrics metrics = progress_.unlogged_metrics;
    reporter_->add_usage(metrics);
    last_logged_ = mean_over_ranks(metrics, world_);
    reporter_->take_usage(last_logged_);
    progress_.epoch_metrics.add(progress_.unlogged_metrics.sums());
    progress_.unlogged_metrics.clear();
    if (world_.rank() == 0)
      for (const auto& [name, value] : last_logged_)
        if (!std::isfinite(value) && warned_names_.insert(name).second)
          base::log_warning("NONFINITE the mean of " + name + " over steps " +
                            std::to_string(progress_.last_logged_step + 1) + " to " + std::to_string(progress_.step) +
                            " is infinite or NaN");
    progress_.last_logged_step = progress_.step;
    reporter_->log_metrics(progress_.step, last_logged_, optimizer_set_->learning_rates());
    for (const auto& callback : components_.callbacks) callback->on_log(*this, last_logged_);
  }

  /// Runs `action` while the module has its averaged weights, if there are any.
  template <typename Action>
  std::invoke_result_t<Action> with_averages(Action action) {
    if (!ema_) return action();
    const auto averaged = ema_->swap();
    return action();
  }

  /// Skips the validation if the job is about to stop; the run that resumes from this checkpoint then runs it.
  void validate_if_due() {
    if (!stop_reason_ || *stop_reason_ == StopReason::kMaxSteps)
      if (std::exchange(progress_.validation_due, false)) run_validation();
  }

  void run_validation() {
    progress_.val_values = with_averages([this] {
      return validate(world_, components_.module, *components_.val, plan_.val_batches, precision_,
                      {.epoch = progress_.epoch, .step = progress_.step});
    });
    reporter_->log_validation(progress_.step, progress_.val_values);
    for (const auto& callback : components_.callbacks) callback->on_validation_end(*this, progress_.val_values);
    reporter_->resume_step_timing();
  }

  void save(bool durable) {
    checkpoint_manager_.save(progress_.step, durable, {.finished = is_finished()});
    reporter_->resume_step_timing();
  }

  /// Returns whether a run that resumes here has nothing left to do.
  bool is_finished() const {
    if (stop_reason_) return *stop_reason_ == StopReason::kMaxSteps || *stop_reason_ == StopReason::kCallback;
    return (options_.max_steps >= 0 && progress_.step >= options_.max_steps) ||
           (options_.max_epochs >= 0 && progress_.epoch >= options_.max_epochs);
  }

  /// Adds what should be the same in a resumed training. Inside an epoch, the order of the samples must be.
  void add_settings() {
    const bool in_epoch =
        state().found() && state().found()->part_names().contains("loader") && !state().read("loader").empty();
    const StateDict order = data::to_state_dict(components_.train->loader().position());
    for (const char* name : {"seed", "num_samples", "shuffle"})
      state().add_setting(std::string("loader.") + name, order.at(name),
                          in_epoch ? SettingRule::kMustMatch : SettingRule::kUsesNew);
    const auto add = [&](const std::string& name, const checkpoint::StateValue& value) {
      state().add_setting(name, value, SettingRule::kUsesNew);
    };
    add("loader.batch_size", components_.train->loader().options().batch_size);
    add("ranks", std::int64_t{world_.size()});
    add("accumulate_grad_batches", std::int64_t{options_.accumulate_grad_batches});
    add("clip_norm", options_.clip_norm);
    add("clip_value", options_.clip_value);
    add("ema", options_.ema);
    state().add_setting("seed", options_.seed ? std::to_string(*options_.seed) : std::string("none"),
                        SettingRule::kUsesSaved);
  }

  /// Restores the state that must exist before the first callback.
  void resume_training() {
    add_settings();
    state().add("model", components_.module);
    optimizer_set_->add_to(state());
    if (ema_)  // not by member_of(): ema_ may be made anew below
      state().add("ema", {.state_dict = [this] { return ema_->state_dict(); },
                          .load_state_dict = [this](const StateDict& saved) { ema_->load_state_dict(saved); },
                          .optional = true});
    state().add("trainer",
                {.state_dict = [this] { return to_state_dict(progress_, seconds()); },
                 .load_state_dict = [this](const StateDict& saved) { load_fit_progress(progress_, saved); }});
    state().add("loader", {.state_dict =
                               [this] {
                                 return progress_.in_epoch ? data::to_state_dict(components_.train->loader().position())
                                                           : StateDict();
                               },
                           .load_state_dict =
                               [this](const StateDict& saved) {
                                 if (saved.empty()) return;
                                 components_.train->loader().restore(data::position_from_state_dict(saved));
                                 progress_.in_epoch = true;
                               }});
    // The checkpoint also has the state of callbacks that this run may not have.
    if (!state().resume({.allow_unknown = true, .train_on = true})) return;
    if (ema_ && !state().found()->part_names().contains("ema"))  // they start from the weights of the checkpoint
      ema_.emplace(components_.module, optim::EmaOptions{.decay = options_.ema});
    next_time_check_ = progress_.step + 1;
    if (world_.rank() == 0)
      base::log_info("resuming after step " + std::to_string(progress_.step) + " from " + state().found()->path());
  }

  /// Adds the state of callbacks, of the user and of this rank, and restores it. Must run last: a random number drawn
  /// between this call and the first step would change the random numbers of that step.
  void add_user_and_rank_state() {
    std::map<std::string, int> counts;  // of callbacks, by class
    for (const auto& callback : components_.callbacks)
      if (auto* const object = dynamic_cast<checkpoint::Stateful*>(callback.get())) {
        const std::string type = class_name(typeid(*callback));
        StateMember member = member_of(*object);
        member.optional = true;
        state().add("callback-" + type + "-" + std::to_string(counts[type]++), std::move(member));
      }
    for (const auto& [name, object] : components_.states) state().add_each_rank(kUserPartPrefix + name, *object);
    state().add(kRankPart, {.state_dict = [this] { return metric_sums(progress_); },
                            .load_state_dict =
                                [this](const StateDict&) { load_metric_sums(progress_, state(), kRankPart, world_); },
                            .each_rank = true});
    state().add_random_state();
    if (world_.rank() == 0)
      for (const std::string& name : state().unknown_parts())
        base::log_warning("resume: " + state().found()->path() + " has state of \"" + name +
                          "\", which this training does not have; it is ignored");
    progress_.unlogged_metrics.take_non_finite_names();  // the previous run warned about these
  }

  TrainingState& state() { return checkpoint_manager_.state(); }

  comm::Group world_;
  const TrainerOptions options_;
  FitComponents components_;
  const amp::Precision precision_;
  const EpochPlan plan_;
  CheckpointManager checkpoint_manager_;
  std::optional<OptimizerSet> optimizer_set_;
  std::optional<optim::Ema> ema_;
  std::optional<TrainingReporter> reporter_;
  FitProgress progress_;
  NamedValues last_logged_;
  std::set<std::string> warned_names_;  // metrics that a warning has named
  std::int64_t num_samples_ = 0;        // of this rank in the current step
  const std::chrono::steady_clock::time_point start_time_ = std::chrono::steady_clock::now();
  std::int64_t next_time_check_ = 1;  // step after which max_time is checked again
  std::optional<StopReason> stop_reason_;
  FitResult result_;
};

}  // namespace

int FitResult::exit_code() const { return reason == StopReason::kStopRequested ? comm::kPreemptedExitCode : 0; }

FitResult run_fit(comm::Group world, const TrainerOptions& options, FitComponents components) {
  if (options.seed) data::seed_everything(*options.seed + static_cast<std::uint64_t>(world.rank()));
  return FitLoop(std::move(world), options, std::move(components)).run();
}

NamedValues run_validation(comm::Group world, const TrainerOptions& options, FitComponents components) {
  require_exact_sharding(*components.val);
  const amp::Precision precision = amp::parse_precision(options.precision);
  amp::cast(components.module, precision);
  components.module.to(world.device());
  const std::int64_t count =
      options.limit_val_batches.resolve(components.val->batches_per_epoch(), "TrainerOptions.limit_val_batches");
  return validate(world, components.module, *components.val, count, precision, {});
}

}  // namespace lockstep::training
