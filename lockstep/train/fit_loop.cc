#include "lockstep/train/fit_loop.h"

#include <ATen/Context.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <optional>
#include <utility>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/amp/master_weights.h"
#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/data/seed.h"
#include "lockstep/nn/sync_batch_norm.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/ema.h"
#include "lockstep/optim/fused_optimizer.h"
#include "lockstep/optim/scheduler.h"
#include "lockstep/train/validation.h"

namespace lockstep::train {
namespace {

using base::UsageError;
using Clock = std::chrono::steady_clock;

/// One of the optimizers and what goes with it.
struct Updater {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  optim::FusedOptimizer* fused = nullptr;
  std::optional<optim::Scheduler> scheduler;
  bool schedule_by_epoch = false;
  std::vector<at::Tensor> parameters;
};

class FitLoop final : public Fit {
 public:
  FitLoop(comm::Group world, const TrainerOptions& options, FitParts parts)
      : world_(std::move(world)), options_(options), parts_(std::move(parts)), precision_(amp::parse_precision(options.precision)), scaler_({.enabled = precision_.loss_scaling}) {
    plan_ = plan_epoch(options_, parts_.train->per_epoch(), parts_.val ? parts_.val->per_epoch() : 0);
    prepare_module();
    make_optimizers();
    if (options_.ema > 0) ema_.emplace(parts_.module, optim::EmaOptions{.decay = options_.ema});
    if (options_.progress_bar && plan_.steps > 0)
      progress_.emplace(world_, ProgressOptions{.num_epochs = std::max<std::int64_t>(1, num_epochs()), .steps_per_epoch = plan_.steps});
  }

  FitResult run() {
    for (const auto& callback : parts_.callbacks) callback->on_fit_start(*this);
    if (parts_.val && plan_.val_batches > 0 && options_.num_sanity_val_steps > 0)
      validate(world_, parts_.module, *parts_.val, std::min<std::int64_t>(options_.num_sanity_val_steps, plan_.val_batches), precision_, {});
    if (plan_.steps > 0)
      while (!ended_ && (options_.max_epochs < 0 || epoch_ < options_.max_epochs)) run_epoch();
    result_.reason = ended_.value_or(EndReason::kDone);
    for (const auto& callback : parts_.callbacks) callback->on_fit_end(*this, result_.reason);
    result_.epochs = epoch_;
    result_.steps = step_;
    return std::move(result_);
  }

  comm::Group& world() override { return world_; }
  torch::nn::Module& module() override { return parts_.module; }
  const std::vector<torch::optim::Optimizer*>& optimizers() const override { return optimizers_; }
  std::int64_t epoch() const override { return epoch_; }
  std::int64_t step() const override { return step_; }
  void end(EndReason reason) override {
    if (!ended_) ended_ = reason;
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
    torch::nn::Module& module = parts_.module;
    if (options_.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    if (options_.sync_batch_norm) nn::convert_sync_batch_norm(module, world_);
    amp::cast(module, precision_);
    module.to(world_.device());
    if (!module.is_training()) module.train();
    if (precision_.master_weights) master_.emplace(module.parameters());
    if (parts_.val) require_exact(*parts_.val);
  }

  void make_optimizers() {
    TrainingSetup setup(world_, parts_.module, master_ ? master_->parameters() : parts_.module.parameters(), plan_.steps, total_steps());
    for (OptimizerPlan& plan : parts_.configure_optimizers(setup)) {
      if (!plan.optimizer) throw UsageError("configure_optimizers() gave a null optimizer; allowed are optimizers");
      Updater& updater = updaters_.emplace_back();
      updater.optimizer = std::move(plan.optimizer);
      updater.fused = dynamic_cast<optim::FusedOptimizer*>(updater.optimizer.get());
      if (updater.fused && master_) throw UsageError("precision " + options_.precision + " has copies in float32 of the weights, which an optimizer of lockstep::optim does not know; allowed are optimizers of torch of setup.parameters()");
      if (plan.schedule) updater.scheduler.emplace(*updater.optimizer, std::move(plan.schedule));
      updater.schedule_by_epoch = plan.schedule_by_epoch;
      for (const auto& group : updater.optimizer->param_groups()) updater.parameters.insert(updater.parameters.end(), group.params().begin(), group.params().end());
      optimizers_.push_back(updater.optimizer.get());
    }
    if (updaters_.empty()) throw UsageError("configure_optimizers() gave no optimizer; allowed is one or more");
    models_ = setup.take();
    if (models_.empty()) models_.push_back(std::make_unique<ddp::DistributedDataParallel>(parts_.module, world_));
    if (master_) master_->take_values();  // those of rank 0, now
    steps_group_ = std::none_of(updaters_.begin(), updaters_.end(), [](const Updater& updater) { return updater.fused != nullptr; });
  }

  void run_epoch() {
    epoch_metrics_.clear();
    parts_.train->begin(options_.overfit_batches == Amount(0) ? static_cast<std::uint64_t>(epoch_) : 0);
    std::int64_t index = 0;
    for (; index < plan_.train_batches && !ended_ && parts_.train->next(); ++index) {
      train_on(index);
      if (plan_.steps_after(index)) end_step();
      if (!ended_ && plan_.validates_after(epoch_, index)) run_validation();
    }
    parts_.train->end();
    tell();
    result_.train_values = mean_over_ranks(epoch_metrics_, world_);
    if (index < plan_.train_batches) return;  // it has not come to its end
    for (Updater& updater : updaters_)
      if (updater.scheduler && updater.schedule_by_epoch) updater.scheduler->step();
    for (const auto& callback : parts_.callbacks) callback->on_epoch_end(*this);
    ++epoch_;
  }

  /// Forward and backward of one batch, for each optimizer in turn.
  void train_on(std::int64_t index) {
    const std::int64_t parts_of_step = plan_.batches_of_step(index);
    const bool first = index % plan_.accumulate == 0, last = plan_.steps_after(index);
    if (precision_.weights != at::kFloat) parts_.train->cast(precision_.weights);
    std::list<ddp::DistributedDataParallel::NoSync> held;
    if (!last)
      for (const auto& model : models_) held.emplace_back(*model);
    for (std::size_t turn = 0; turn < updaters_.size(); ++turn) {
      const Turn only(updaters_, turn);
      if (first) zero_grad(updaters_[turn]);
      StepLog log(window_, "");
      log.epoch = epoch_;
      log.batch = index;
      log.step = step_;
      log.num_samples = parts_.train->num_samples();
      log.optimizer = static_cast<int>(turn);
      at::Tensor loss;
      {
        const amp::Autocast autocast({.device = world_.device().type(), .dtype = precision_.autocast, .enabled = precision_.autocast.has_value()});
        loss = parts_.train->step(log);
      }
      if (!loss.defined()) throw UsageError("training_step() gave no loss; allowed is a tensor of one element");
      log.log(turn == 0 ? "loss" : "loss_" + std::to_string(turn), loss);
      scaler_.scale(parts_of_step == 1 ? loss : loss / static_cast<double>(parts_of_step)).backward();
      if (last) update(updaters_[turn]);
    }
    if (last) scaler_.update();
  }

  /// While it lives, gradients of other optimizers' parameters stay as they are: a generator's loss is no business of the discriminator.
  class Turn {
   public:
    Turn(std::vector<Updater>& updaters, std::size_t turn) {
      if (updaters.size() == 1) return;
      std::vector<const void*> mine;
      for (const at::Tensor& parameter : updaters[turn].parameters) mine.push_back(parameter.unsafeGetTensorImpl());
      for (std::size_t other = 0; other < updaters.size(); ++other)
        for (const at::Tensor& parameter : updaters[other].parameters)
          if (other != turn && parameter.requires_grad() && std::find(mine.begin(), mine.end(), parameter.unsafeGetTensorImpl()) == mine.end()) {
            parameter.requires_grad_(false);
            held_.push_back(parameter);
          }
    }
    ~Turn() {
      for (const at::Tensor& parameter : held_) parameter.requires_grad_(true);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    std::vector<at::Tensor> held_;
  };

  void zero_grad(Updater& updater) {
    updater.optimizer->zero_grad();
    if (master_) parts_.module.zero_grad();
  }

  void update(Updater& updater) {
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

  void clip(Updater& updater) const {
    if (updater.fused) {
      if (options_.clip_norm > 0) updater.fused->clip_grad_norm(options_.clip_norm);
      if (options_.clip_value > 0) updater.fused->clip_grad_value(options_.clip_value);
    } else {
      if (options_.clip_norm > 0) optim::clip_grad_norm(updater.parameters, options_.clip_norm);
      if (options_.clip_value > 0) optim::clip_grad_value(updater.parameters, options_.clip_value);
    }
  }

  void end_step() {
    if (ema_) ema_->update();
    if (steps_group_) world_.step();
    ++step_;
    for (const auto& callback : parts_.callbacks) callback->on_step(*this);
    if (step_ % options_.log_every_n_steps == 0) tell();
    if (progress_) progress_->step(shown_);
    if (options_.max_steps >= 0 && step_ >= options_.max_steps) end(EndReason::kMaxSteps);
    if (options_.max_time.count() > 0 && out_of_time()) end(EndReason::kMaxTime);
    if (world_.stop_requested()) end(EndReason::kStopped);
  }

  /// By rank 0's clock. It is asked about once a second: each answer says after how many steps it is asked again.
  bool out_of_time() {
    if (step_ < ask_at_) return false;
    const double passed = std::chrono::duration<double>(Clock::now() - began_).count(), limit = static_cast<double>(options_.max_time.count());
    const double each = passed / static_cast<double>(step_), pause = std::min(1.0, std::max(0.0, limit - passed));
    const std::int64_t steps = std::clamp<std::int64_t>(static_cast<std::int64_t>(pause / std::max(each, 1e-6)), 1, 100000);
    const std::int64_t answer = std::stoll(world_.broadcast_bytes(passed >= limit ? "0" : std::to_string(steps), 0));
    ask_at_ = step_ + answer;
    return answer == 0;
  }

  /// Means over all ranks since the last time.
  void tell() {
    if (window_.empty()) return;
    shown_ = mean_over_ranks(window_, world_);
    epoch_metrics_.add(window_.sums());
    window_.clear();
    for (const auto& callback : parts_.callbacks) callback->on_log(*this, shown_);
  }

  void run_validation() {
    const auto now = [this] { return validate(world_, parts_.module, *parts_.val, plan_.val_batches, precision_, {epoch_, step_}); };
    if (ema_) {
      const auto averaged = ema_->swap();
      result_.val_values = now();
    } else {
      result_.val_values = now();
    }
    for (const auto& callback : parts_.callbacks) callback->on_validation_end(*this, result_.val_values);
  }

  comm::Group world_;
  const TrainerOptions options_;
  FitParts parts_;
  const amp::Precision precision_;
  EpochPlan plan_;
  std::optional<amp::MasterWeights> master_;
  amp::GradScaler scaler_;
  std::vector<std::unique_ptr<ddp::DistributedDataParallel>> models_;  // before the optimizers that know them
  std::vector<Updater> updaters_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  bool steps_group_ = true;  // else an optimizer does
  std::optional<optim::Ema> ema_;
  std::optional<Progress> progress_;
  Metrics window_, epoch_metrics_;
  NamedValues shown_;
  std::int64_t epoch_ = 0, step_ = 0;
  const Clock::time_point began_ = Clock::now();
  std::int64_t ask_at_ = 1;  // the step after which max_time is looked at again
  std::optional<EndReason> ended_;
  FitResult result_;
};

}  // namespace

int FitResult::exit_code() const { return reason == EndReason::kStopped ? comm::kPreemptedExitCode : 0; }

FitResult run_fit(comm::Group world, const TrainerOptions& options, FitParts parts) {
  if (options.seed) data::seed_everything(*options.seed + static_cast<std::uint64_t>(world.rank()));
  return FitLoop(std::move(world), options, std::move(parts)).run();
}

NamedValues run_validation(comm::Group world, const TrainerOptions& options, FitParts parts) {
  require_exact(*parts.val);
  const amp::Precision precision = amp::parse_precision(options.precision);
  amp::cast(parts.module, precision);
  parts.module.to(world.device());
  const std::int64_t count = options.limit_val_batches.of(parts.val->per_epoch(), "TrainerOptions.limit_val_batches");
  return validate(world, parts.module, *parts.val, count, precision, {});
}

}  // namespace lockstep::train
