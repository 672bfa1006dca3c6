#include "lockstep/train/trainer_options.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <type_traits>

#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::training {
namespace {

using base::UsageError;

void require(bool valid, const char* option, const std::string& value, const char* expected) {
  if (!valid) throw UsageError(std::string("TrainerOptions.") + option + " is " + value + "; expected " + expected);
}

template <typename Number>
  requires std::is_arithmetic_v<Number>
void require(bool valid, const char* option, Number value, const char* expected) {
  require(valid, option, std::to_string(value), expected);
}

void check_devices(const Devices& devices) {
  if (devices.count())
    require(*devices.count() >= 1 && *devices.count() <= 4096, "devices", *devices.count(), "1 to 4096");
  if (!devices.gpus()) return;
  const std::set<int> distinct(devices.gpus()->begin(), devices.gpus()->end());
  require(!distinct.empty() && *distinct.begin() >= 0 && distinct.size() == devices.gpus()->size(), "devices",
          "{" + base::joined(*devices.gpus()) + "}", "a list of distinct GPU indices, 0 or more");
}

void check(const TrainerOptions& options) {
  check_devices(options.devices);
  require(options.nodes >= 1 && options.nodes <= 4096, "nodes", options.nodes, "1 to 4096");
  require(options.max_restarts >= 0 && options.max_restarts <= 1000000, "max_restarts", options.max_restarts,
          "0 to 1000000");
  require(options.max_epochs >= -1, "max_epochs", options.max_epochs, "-1 (no limit) or at least 0");
  require(options.max_steps >= -1, "max_steps", options.max_steps, "-1 (no limit) or at least 0");
  require(options.max_time.count() >= 0, "max_time", std::to_string(options.max_time.count()) + " s",
          "0 (no limit) or more");
  amp::parse_precision(options.precision);
  require(options.accumulate_grad_batches >= 1, "accumulate_grad_batches", options.accumulate_grad_batches,
          "1 or more");
  require(options.clip_norm >= 0, "clip_norm", options.clip_norm, "0 (off) or more");
  require(options.clip_value >= 0, "clip_value", options.clip_value, "0 (off) or more");
  require(options.ema >= 0 && options.ema < 1, "ema", options.ema, "0 (off) or more and less than 1");
  require(options.check_val_every_n_epoch >= 1, "check_val_every_n_epoch", options.check_val_every_n_epoch,
          "1 or more");
  require(options.num_sanity_val_steps >= 0, "num_sanity_val_steps", options.num_sanity_val_steps, "0 (none) or more");
  require(options.fast_dev_run >= 0, "fast_dev_run", options.fast_dev_run, "0 (off) or more");
  require(options.save_every_n_steps >= 0, "save_every_n_steps", options.save_every_n_steps, "0 (off) or more");
  require(options.save_every_n_epochs >= 0, "save_every_n_epochs", options.save_every_n_epochs, "0 (off) or more");
  require(options.keep_checkpoints >= 2, "keep_checkpoints", options.keep_checkpoints, "2 or more");
  require(options.name.find('/') == std::string::npos && !options.name.starts_with('.'), "name",
          base::quoted(options.name, 80), "a directory name without / that does not begin with a dot");
  require(!options.folder.empty() || options.resume != "auto", "resume", "\"auto\"",
          "a path, because there are no runs to search without TrainerOptions.folder");
  require(!options.folder.empty() || !options.trace, "trace", "true",
          "false, because nothing is written without TrainerOptions.folder");
  require(options.flops_per_step >= 0 && options.peak_flops >= 0 &&
              (options.flops_per_step > 0) == (options.peak_flops > 0),
          "flops_per_step, peak_flops",
          std::to_string(options.flops_per_step) + ", " + std::to_string(options.peak_flops),
          "both above 0, or both 0 (no MFU)");
  require(options.log_every_n_steps >= 1, "log_every_n_steps", options.log_every_n_steps, "1 or more");
}

}  // namespace

std::string CountOrFraction::to_string() const {
  std::ostringstream text;
  if (is_fraction_)
    text << fraction_ << (fraction_ == std::floor(fraction_) ? ".0" : "");
  else
    text << count_;
  return text.str();
}

std::int64_t CountOrFraction::resolve(std::int64_t num_batches, const std::string& option) const {
  if (is_fraction_ ? !(fraction_ >= 0 && fraction_ <= 1) : count_ < 0)
    throw base::UsageError(option + " is " + to_string() +
                           "; expected a count of batches, 0 or more, or a fraction of them, 0.0 to 1.0");
  if (!is_fraction_) return std::min(count_, num_batches);
  const auto whole = static_cast<std::int64_t>(fraction_ * static_cast<double>(num_batches));
  if (whole == 0 && fraction_ > 0 && num_batches > 0)
    throw base::UsageError(option + " is " + to_string() + ", which is less than one of " +
                           std::to_string(num_batches) + " batches; expected 0.0, a fraction of at least " +
                           std::to_string(1.0 / static_cast<double>(num_batches)) + ", or a count");
  return whole;
}

TrainerOptions resolve_options(TrainerOptions options) {
  check(options);
  if (options.max_epochs == -1 && options.max_steps == -1 && options.max_time.count() == 0) options.max_epochs = 1000;
  if (options.overfit_batches != CountOrFraction(0)) {
    options.limit_train_batches = options.overfit_batches;
    options.limit_val_batches = options.overfit_batches;
  }
  if (options.fast_dev_run > 0) {
    options.limit_train_batches = CountOrFraction(options.fast_dev_run);
    options.limit_val_batches = CountOrFraction(options.fast_dev_run);
    options.val_check_interval = CountOrFraction(1.0);
    options.check_val_every_n_epoch = 1;
    options.max_epochs = 1;
    options.max_steps = -1;
    options.num_sanity_val_steps = 0;
    options.folder = options.resume = "";
    options.trace = false;
  }
  if (options.barebones) {
    options.progress_bar = options.model_summary = false;
    options.folder = "";
    options.trace = false;
    options.num_sanity_val_steps = 0;
  }
  return options;
}

std::int64_t EpochPlan::batches_in_step(std::int64_t index) const {
  const std::int64_t first = index / accumulate_grad_batches * accumulate_grad_batches;
  return std::min(accumulate_grad_batches, train_batches - first);
}

bool EpochPlan::is_step_end(std::int64_t index) const {
  return (index + 1) % accumulate_grad_batches == 0 || index + 1 == train_batches;
}

bool EpochPlan::should_validate_after(std::int64_t epoch, std::int64_t index) const {
  if (val_interval == 0 || val_batches == 0 || (epoch + 1) % val_epoch_interval != 0) return false;
  return (index + 1) % val_interval == 0 || (val_interval == train_batches && index + 1 == train_batches);
}

EpochPlan plan_epoch(const TrainerOptions& options, std::int64_t train_batches, std::int64_t val_batches) {
  EpochPlan plan;
  plan.accumulate_grad_batches = options.accumulate_grad_batches;
  plan.val_epoch_interval = options.check_val_every_n_epoch;
  plan.train_batches = options.limit_train_batches.resolve(train_batches, "TrainerOptions.limit_train_batches");
  plan.val_batches = options.limit_val_batches.resolve(val_batches, "TrainerOptions.limit_val_batches");
  plan.val_interval = options.val_check_interval.resolve(plan.train_batches, "TrainerOptions.val_check_interval");
  plan.steps = (plan.train_batches + plan.accumulate_grad_batches - 1) / plan.accumulate_grad_batches;
  if (plan.val_interval % plan.accumulate_grad_batches != 0 && plan.val_interval != plan.train_batches)
    throw UsageError("TrainerOptions.val_check_interval is " + options.val_check_interval.to_string() + " (every " +
                     std::to_string(plan.val_interval) + " batches), which ends inside a step of " +
                     std::to_string(plan.accumulate_grad_batches) +
                     " batches; expected a multiple of TrainerOptions.accumulate_grad_batches");
  return plan;
}

}  // namespace lockstep::training
