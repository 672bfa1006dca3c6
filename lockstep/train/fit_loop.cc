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
#include <utility>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/data/seed.h"
#include "lockstep/nn/sync_batch_norm.h"
#include "lockstep/optim/ema.h"
#include "lockstep/train/fit_progress.h"
#include "lockstep/train/checkpoint_manager.h"
#include "lockstep/train/step_error.h"
#include "lockstep/nn/module_summary.h"
#include "lockstep/train/optimizer_set.h"
#include "lockstep/train/validation.h"
#include "lockstep/train/loggers/record_file.h"
#include "lockstep/train/training_reporter.h"

namespace lockstep::train {
namespace {

using base::UsageError;
using checkpoint::StateDict;
using checkpoint::value_of;
using Clock = std::chrono::steady_clock;

constexpr const char* kReasons[] = {"all epochs were made", "max_steps", "max_time", "it was asked to stop",
                                    "by a callback"};  // of EndReason

// Parts of a checkpoint.
constexpr const char* kModel = "model";
constexpr const char* kTrainer = "trainer";
constexpr const char* kEma = "ema";
constexpr const char* kEmaUpdates = "ema_updates";  // in kTrainer
constexpr const char* kOwn = "rank";                // of each rank
constexpr const char* kUsers = "user-";             // likewise, in front of their names

StateDict weights_of(const torch::nn::Module& module) {
  StateDict weights;
  for (const auto& item : module.named_parameters()) weights[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) weights[item.key()] = item.value();
  return weights;
}

/// "EarlyStopping", as a part of a name of a file.
std::string name_of_class(const std::type_info& type) {
  std::string text = c10::demangle(type.name());
  text = text.substr(text.rfind(':') + 1);
  for (char& c : text)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') c = '-';
  return text.substr(0, 40);
}

class FitLoop final : public Fit {
 public:
  FitLoop(comm::Group world, const TrainerOptions& options, FitParts parts)
      : world_(std::move(world)),
        options_(options),
        parts_(std::move(parts)),
        precision_(amp::parse_precision(options.precision)),
        plan_(plan_epoch(options_, parts_.train->per_epoch(), parts_.val ? parts_.val->per_epoch() : 0)),
        keeper_(world_, options_, parts_.number) {
    prepare_module();
    updaters_.emplace(world_, parts_.module, options_, parts_.configure_optimizers, plan_.steps, total_steps(),
                      keeper_.found());
    if (options_.ema > 0) ema_.emplace(parts_.module, optim::EmaOptions{.decay = options_.ema});
    if (keeper_.found()) load_training(*keeper_.found());
    watch_.emplace(world_, options_,
                   WatchPlan{.folder = keeper_.folder(),
                             .step = place_.step,
                             .steps_per_epoch = plan_.steps,
                             .num_epochs = std::max<std::int64_t>(1, num_epochs()),
                             .goes_on = keeper_.found().has_value()});
  }

  FitResult run() {
    world_.stop_requested();  // from here on a signal is a wish, which the first step answers
    if (options_.model_summary && world_.rank() == 0)
      std::fputs(summary(parts_.module).c_str(), stdout), std::fflush(stdout);
    for (const auto& callback : parts_.callbacks) callback->on_fit_start(*this);
    if (keeper_.found())
      load_rest(*keeper_.found());
    else if (parts_.val && plan_.val_batches > 0 && options_.num_sanity_val_steps > 0)
      validate(world_, parts_.module, *parts_.val,
               std::min<std::int64_t>(options_.num_sanity_val_steps, plan_.val_batches), precision_, {});
    watch_->steps_go_on();
    if (plan_.steps > 0 && (options_.max_steps < 0 || place_.step < options_.max_steps))
      while (!ended_ && (options_.max_epochs < 0 || place_.epoch < options_.max_epochs)) run_epoch();
    result_.reason = ended_.value_or(EndReason::kDone);
    if (place_.step > 0 && keeper_.due_at_end(place_.step)) save(/*durable=*/true);
    keeper_.finish();
    for (const auto& callback : parts_.callbacks) callback->on_fit_end(*this, result_.reason);
    watch_->end(place_.step, kReasons[static_cast<int>(result_.reason)]);
    result_.epochs = place_.epoch;
    result_.steps = place_.step;
    result_.train_values = place_.train_values;
    result_.val_values = place_.val_values;
    result_.folder = keeper_.folder();
    return std::move(result_);
  }

  comm::Group& world() override { return world_; }
  torch::nn::Module& module() override { return parts_.module; }
  const std::vector<torch::optim::Optimizer*>& optimizers() const override { return updaters_->optimizers(); }
  std::int64_t epoch() const override { return place_.epoch; }
  std::int64_t step() const override { return place_.step; }
  const std::string& folder() const override { return keeper_.folder(); }
  Loggers& loggers() override { return watch_->loggers(); }
  void end(EndReason reason) override {
    if (!ended_) ended_ = reason;
  }
  bool save_weights(const std::string& path) override {
    return with_averages([&] {
      return keeper_.write_on_rank_0("save weights to " + path, [&] {
        make_folder_of(path);
        checkpoint::save(parts_.module, path);
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
    torch::nn::Module& module = parts_.module;
    if (options_.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    if (options_.sync_batch_norm) nn::convert_sync_batch_norm(module, world_);
    amp::cast(module, precision_);
    module.to(world_.device());
    if (!module.is_training()) module.train();
    if (parts_.val) require_exact(*parts_.val);
    // Before anybody has copies of them, or shares them between ranks.
    if (keeper_.found())
      checkpoint::load(module, keeper_.found()->path() + "/" + checkpoint::file_name(kModel, 0, "safetensors"));
  }

  void run_epoch() {
    parts_.train->begin(data_epoch());
    // Behind the beginning where the training goes on inside an epoch, maybe on another number of ranks.
    const std::int64_t first = std::min(plan_.train_batches, parts_.train->per_epoch() - parts_.train->in_this_epoch());
    EpochPlan plan = plan_;
    plan.train_batches -= first;
    std::int64_t index = first;
    place_.in_epoch = true;
    validate_if_due();  // the run before was stopped just then
    while (index < plan_.train_batches && !ended_ && next_batch()) {
      const std::int64_t batch = index++;
      train_on(batch, plan, batch - first);
      place_.validation_due |= plan_.validates_after(place_.epoch, batch);
      if (!plan.steps_after(batch - first)) continue;
      end_step();
      validate_if_due();
      if (!ended_ && index < plan_.train_batches && keeper_.due_after_step(place_.step)) save(/*durable=*/false);
    }
    parts_.train->end();
    tell();
    place_.train_values = mean_over_ranks(place_.epoch_metrics, world_);
    if (index < plan_.train_batches || place_.validation_due) return;  // it has not come to its end
    updaters_->end_epoch();
    for (const auto& callback : parts_.callbacks) callback->on_epoch_end(*this);
    place_.epoch_metrics.clear();
    place_.in_epoch = false;
    ++place_.epoch;
    if (keeper_.due_after_epoch(place_.epoch) || keeper_.due_after_step(place_.step)) save(/*durable=*/false);
    watch_->steps_go_on();
  }

  // The order of the samples is that of this epoch.
  std::uint64_t data_epoch() const {
    return options_.overfit_batches == Amount(0) ? static_cast<std::uint64_t>(place_.epoch) : 0;
  }

  bool next_batch() {
    const auto in = watch_->timer().in(Phase::kData);
    return parts_.train->next();
  }

  /// Forward and backward of one batch, for each optimizer in turn. `place`: its number among those that `plan` has.
  void train_on(std::int64_t index, const EpochPlan& plan, std::int64_t place) {
    const bool first = place % plan.accumulate == 0, last = plan.steps_after(place);
    if (precision_.weights != at::kFloat) parts_.train->cast(precision_.weights);
    std::list<ddp::DistributedDataParallel::NoSync> held;
    if (!last)
      for (const auto& model : updaters_->models()) held.emplace_back(*model);
    const std::int64_t samples = parts_.train->num_samples();
    num_samples_ += samples;
    for (std::size_t turn = 0; turn < updaters_->size(); ++turn) {
      const Updaters::Turn only(*updaters_, turn);
      if (first) updaters_->zero_grad(turn);
      StepLog log(place_.window, "");
      log.epoch = place_.epoch;
      log.batch = index;
      log.step = place_.step;
      log.num_samples = samples;
      log.optimizer = static_cast<int>(turn);
      backward(forward(log), plan.batches_of_step(place));
      if (!last) continue;
      const auto in = watch_->timer().in(Phase::kOptimizer);
      updaters_->update(turn);
    }
    if (last) updaters_->end_step();
    for (const std::string& name : place_.window.take_not_finite())
      if (not_finite_.insert(name).second)
        base::log_warning("NONFINITE " + name + " is infinite or NaN on rank " + std::to_string(world_.rank()) +
                          " since " +
                          place_of_batch("training_step()", {place_.epoch, index, place_.step}, *parts_.train));
  }

  at::Tensor forward(StepLog& log) {
    const auto in = watch_->timer().in(Phase::kForward);
    std::optional<amp::Autocast> autocast;
    if (precision_.autocast)
      autocast.emplace(amp::AutocastOptions{.device = world_.device().type(), .dtype = precision_.autocast});
    const at::Tensor loss = in_users_code("training_step()", {log.epoch, log.batch, log.step}, *parts_.train,
                                          [&] { return parts_.train->step(log); });
    if (!loss.defined()) throw UsageError("training_step() gave no loss; allowed is a tensor of one element");
    log.log(log.optimizer == 0 ? "loss" : "loss_" + std::to_string(log.optimizer), loss);
    return loss;
  }

  /// Takes the loss: what it holds is free before the update.
  void backward(at::Tensor loss, std::int64_t batches) {
    const auto in = watch_->timer().in(Phase::kBackward);
    updaters_->backward(std::move(loss), batches);
  }

  void end_step() {
    if (ema_) ema_->update();
    if (!updaters_->end_steps()) world_.step();
    ++place_.step;
    for (const auto& callback : parts_.callbacks) callback->on_step(*this);
    watch_->step(place_.step, std::exchange(num_samples_, 0), shown_);
    if (place_.step % options_.log_every_n_steps == 0) tell();
    keeper_.look();
    if (options_.max_steps >= 0 && place_.step >= options_.max_steps) end(EndReason::kMaxSteps);
    if (options_.max_time.count() > 0 && out_of_time()) end(EndReason::kMaxTime);
    if (world_.stop_requested()) end(EndReason::kStopped);
  }

  double seconds() const { return place_.seconds + std::chrono::duration<double>(Clock::now() - began_).count(); }

  /// By rank 0's clock. It is asked about once a second: each answer says after how many steps it is asked again.
  bool out_of_time() {
    if (place_.step < ask_at_) return false;
    const double passed = seconds(), limit = static_cast<double>(options_.max_time.count());
    const double each = passed / static_cast<double>(place_.step), pause = std::min(1.0, std::max(0.0, limit - passed));
    const std::int64_t steps =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(pause / std::max(each, 1e-6)), 1, 100000);
    const std::int64_t answer = std::stoll(world_.broadcast_bytes(passed >= limit ? "0" : std::to_string(steps), 0));
    ask_at_ = place_.step + answer;
    return answer == 0;
  }

  /// Means over all ranks since the last time.
  void tell() {
    if (place_.window.empty()) return;
    shown_ = mean_over_ranks(place_.window, world_);
    place_.epoch_metrics.add(place_.window.sums());
    place_.window.clear();
    if (world_.rank() == 0)
      for (const auto& [name, value] : shown_)
        if (!std::isfinite(value) && not_finite_.insert(name).second)
          base::log_warning("NONFINITE the mean of " + name + " is infinite or NaN since step " +
                            std::to_string(place_.told_at + 1) + " to " + std::to_string(place_.step));
    place_.told_at = place_.step;
    watch_->values(place_.step, shown_, updaters_->rates());
    for (const auto& callback : parts_.callbacks) callback->on_log(*this, shown_);
  }

  /// While the module has the averages of its weights, where there are some.
  template <typename Action>
  std::invoke_result_t<Action> with_averages(Action action) {
    if (!ema_) return action();
    const auto averaged = ema_->swap();
    return action();
  }

  /// Whoever is to leave soon does not validate first: the run that goes on from here does.
  void validate_if_due() {
    if (!ended_ || *ended_ == EndReason::kMaxSteps)
      if (std::exchange(place_.validation_due, false)) run_validation();
  }

  void run_validation() {
    place_.val_values = with_averages([this] {
      return validate(world_, parts_.module, *parts_.val, plan_.val_batches, precision_, {place_.epoch, place_.step});
    });
    watch_->validated(place_.step, place_.val_values);
    for (const auto& callback : parts_.callbacks) callback->on_validation_end(*this, place_.val_values);
    watch_->steps_go_on();
  }

  void save(bool durable) {
    keeper_.save(place_.step, [this] { return training(); }, durable);
    watch_->steps_go_on();
  }

  /// What this rank writes of a checkpoint.
  checkpoint::Parts training() const {
    checkpoint::Parts parts = {{kOwn, own_state(place_, world_.device())}};
    for (const auto& [name, state] : parts_.states) parts[kUsers + name] = state->state_dict();
    updaters_->add_to(parts);
    if (world_.rank() != 0) return parts;
    parts[kModel] = weights_of(parts_.module);
    parts[kTrainer] = state_of(place_, *parts_.train, seconds());
    if (ema_) {
      optim::Ema::State state = ema_->state();
      for (auto& [name, tensor] : state.averages) parts[kEma][name] = std::move(tensor);
      parts[kTrainer][kEmaUpdates] = state.updates;
    }
    for (const auto& [name, state] : states_of_callbacks()) parts[name] = state->state_dict();
    return parts;
  }

  /// "callback-0", ... by their order among those of their class.
  std::vector<std::pair<std::string, checkpoint::Stateful*>> states_of_callbacks() const {
    std::vector<std::pair<std::string, checkpoint::Stateful*>> states;
    std::map<std::string, int> counts;
    for (const auto& callback : parts_.callbacks)
      if (auto* const state = dynamic_cast<checkpoint::Stateful*>(callback.get())) {
        const std::string kind = name_of_class(typeid(*callback));
        states.emplace_back("callback-" + kind + "-" + std::to_string(counts[kind]++), state);
      }
    return states;
  }

  /// What has to be there before the first callback.
  void load_training(const checkpoint::SavedCheckpoint& saved) {
    updaters_->load(saved);
    const StateDict trainer = saved.read(kTrainer);
    if (ema_) {
      optim::Ema::State state{.updates = value_of<std::int64_t>(trainer, kEmaUpdates)};
      const StateDict averages = saved.read(kEma);
      for (const auto& [name, value] : averages)
        state.averages.emplace_back(name, value_of<at::Tensor>(averages, name));
      ema_->resume(state);
    }
    load_place(place_, *parts_.train, trainer);
    ask_at_ = place_.step + 1;
    world_.catch_up(place_.step);  // steps are numbered as if the training had never stopped
    if (world_.rank() == 0)
      base::log_info("the training goes on after step " + std::to_string(place_.step) + " from " + saved.path());
  }

  /// What callbacks and a user have, and this rank's own; the last, as nothing may draw random numbers afterwards.
  void load_rest(const checkpoint::SavedCheckpoint& saved) {
    const std::set<std::string> parts = saved.parts();
    for (const auto& [name, state] : states_of_callbacks()) {
      if (parts.contains(name))
        state->load_state_dict(saved.read(name));
      else if (world_.rank() == 0)
        base::log_warning(saved.path() + " has no state of " + name + ", which begins anew");
    }
    for (const auto& [name, state] : parts_.states)
      state->load_state_dict(saved.read(kUsers + name, world_.rank() < saved.world_size() ? world_.rank() : 0));
    load_own_state(place_, saved, kOwn, world_);
    place_.window.take_not_finite();  // these were told of
  }

  comm::Group world_;
  const TrainerOptions options_;
  FitParts parts_;
  const amp::Precision precision_;
  const EpochPlan plan_;
  Keeper keeper_;
  std::optional<Updaters> updaters_;
  std::optional<optim::Ema> ema_;
  std::optional<Watch> watch_;
  FitPlace place_;
  NamedValues shown_;
  std::set<std::string> not_finite_;  // names that were warned of
  std::int64_t num_samples_ = 0;      // of this rank in the step
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
