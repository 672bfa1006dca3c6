// Callbacks of the Trainer, and the early stopping and best-model callbacks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/loggers/logger_collection.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep::training {

/// The reason why fit() ended; the same on all ranks.
enum class StopReason {
  kCompleted,  ///< max_epochs reached, or nothing was left to train
  kMaxSteps,
  kMaxTime,
  kStopRequested,  ///< the job received SIGTERM or SIGUSR1
  kCallback,       ///< a callback called FitContext::stop()
};

/// The interface through which callbacks read and control the running fit().
class FitContext {
 public:
  virtual comm::Group& world() = 0;
  virtual torch::nn::Module& module() = 0;
  virtual const std::vector<torch::optim::Optimizer*>& optimizers() const = 0;
  virtual std::int64_t epoch() const = 0;  ///< from 0
  virtual std::int64_t step() const = 0;   ///< updates so far, over all epochs
  /// Ends the training after the current step or validation. All ranks must call it in the same step, so a callback
  /// must decide from values that are equal on all ranks, such as means over ranks.
  virtual void stop(StopReason reason) = 0;

  /// The directory of this run, such as "runs/mnist"; empty when the run writes nothing.
  virtual const std::string& folder() const = 0;
  /// The loggers of this run: for logging texts, histograms and images, and for adding loggers. The Trainer logs the
  /// training metrics itself.
  virtual LoggerCollection& loggers() = 0;
  /// Rank 0 writes the module's weights, or with TrainerOptions.ema their averages, as lockstep::save() does. All ranks
  /// call it and block until the file is written. When writing fails, it throws SystemError on all ranks if
  /// TrainerOptions.on_disk_error is kStop; with kContinue it logs a warning and returns false on all ranks.
  virtual bool save_weights(const std::string& path) = 0;

 protected:
  ~FitContext() = default;
};

/// Base class of callbacks. All ranks must have the same callbacks; they are called in the order of Trainer::add(). An
/// exception from a callback propagates out of fit(). The state of a callback that is also a checkpoint::Stateful is
/// saved from rank 0 and loaded after on_fit_start() when a run resumes. Callbacks of the same class are identified by
/// their order.
class Callback {
 public:
  virtual ~Callback() = default;
  virtual void on_fit_start(FitContext&) {}
  /// Called after each update, on the critical path of every step: it should return quickly.
  virtual void on_step(FitContext&) {}
  /// Called every log_every_n_steps steps, with means over all ranks since the previous call.
  virtual void on_log(FitContext&, const NamedValues&) {}
  virtual void on_validation_end(FitContext&, const NamedValues&) {}
  virtual void on_epoch_end(FitContext&) {}
  /// Called at the end of fit(), unless fit() throws.
  virtual void on_fit_end(FitContext&, StopReason) {}
};

struct EarlyStoppingOptions {
  std::string monitor = "val_loss";  ///< a value of the validation
  bool maximize = false;             ///< more is better
  std::int64_t patience = 3;         ///< consecutive validations without improvement that are tolerated
  double min_delta = 0;              ///< minimum change that counts as an improvement
  bool check_finite = true;          ///< stop at once when the value is infinite or NaN
};

/// Ends the training when a validation value stops improving.
class EarlyStopping : public Callback, public checkpoint::Stateful {
 public:
  /// Throws UsageError.
  explicit EarlyStopping(const EarlyStoppingOptions& options = {});
  /// Throws a UsageError that lists the available values if the validation has no value named `monitor`.
  void on_validation_end(FitContext& fit, const NamedValues& values) override;
  double best() const { return best_; }
  checkpoint::StateDict state_dict() const override {
    return {{"best", best_}, {"no_better", num_without_improvement_}};
  }
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  const EarlyStoppingOptions options_;
  double best_;
  std::int64_t num_without_improvement_ = 0;
};

struct ModelCheckpointOptions {
  std::string monitor = "val_loss";  ///< a value of the validation
  bool maximize = false;             ///< more is better
  int top_k = 1;                     ///< number of files kept
};

/// Saves the weights of the best validations as FOLDER/best/step-1200-val_loss-0.0832.safetensors. A file that is no
/// longer among the top_k is deleted after the new one is on the disk. Values that are not finite are ignored. The
/// files hold weights only; to resume a run, use the Trainer's checkpoints.
class ModelCheckpoint : public Callback, public checkpoint::Stateful {
 public:
  /// Throws UsageError.
  explicit ModelCheckpoint(const ModelCheckpointOptions& options = {});
  /// Does nothing in a run without a directory. Throws like FitContext::save_weights(), and UsageError if the
  /// validation has no value named `monitor`.
  void on_validation_end(FitContext& fit, const NamedValues& values) override;

  /// Path of the best file; empty when nothing was saved.
  std::string best_path() const { return saved_models_.empty() ? "" : saved_models_.front().path; }
  /// Paths of the saved files, best first.
  std::vector<std::string> paths() const;
  checkpoint::StateDict state_dict() const override;
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  struct SavedModel {
    double value = 0;
    std::string path;
  };
  const ModelCheckpointOptions options_;
  std::vector<SavedModel> saved_models_;  // best first
};

/// Returns the value called `name`. Throws a UsageError that begins with `caller` and lists the available names.
double require_value(const NamedValues& values, const std::string& name, const std::string& caller);

}  // namespace lockstep::training
