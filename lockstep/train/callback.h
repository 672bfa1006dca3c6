// What is called at certain moments of a training.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/loggers/logger_collection.h"
#include "lockstep/train/loggers/named_values.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep::train {

/// Why a training ended. The same on all ranks.
enum class StopReason {
  kCompleted,  ///< max_epochs, or there was nothing to do
  kMaxSteps,
  kMaxTime,
  kStopRequested,  ///< somebody asked this job to leave: SIGTERM, SIGUSR1
  kCallback,       ///< a callback had seen enough
};

/// A training as callbacks see it, and steer it.
class FitContext {
 public:
  virtual comm::Group& world() = 0;
  virtual torch::nn::Module& module() = 0;
  virtual const std::vector<torch::optim::Optimizer*>& optimizers() const = 0;
  virtual std::int64_t epoch() const = 0;  ///< from 0
  virtual std::int64_t step() const = 0;   ///< updates made, over all epochs
  /// The training ends after this step, or this validation. All ranks call it alike: what a callback decides by must be
  /// the same on all, as means over ranks are.
  virtual void end(StopReason reason) = 0;

  /// Of this run: "runs/mnist"; empty when it writes nothing.
  virtual const std::string& folder() const = 0;
  /// For texts, histograms and images, and for loggers of a user's own; the numbers of the training are written without
  /// anybody's doing.
  virtual LoggerCollection& loggers() = 0;
  /// Rank 0 writes the module's weights, or with TrainerOptions.ema their averages, as lockstep::save() does. All ranks
  /// call it, and wait for it. Returns false, on all of them, when the disk does not take it and
  /// TrainerOptions.on_disk_error is kContinue, after a warning; throws SystemError with kStop.
  virtual bool save_weights(const std::string& path) = 0;

 protected:
  ~FitContext() = default;
};

/// All ranks have the same callbacks and call them in the order in which they were given. What one throws ends the
/// training. One that is also a checkpoint::Stateful has its state in checkpoints, rank 0's; a training that goes on
/// loads it after on_fit_start(). Several of one class are told apart by their order.
class Callback {
 public:
  virtual ~Callback() = default;
  virtual void on_fit_start(FitContext&) {}
  /// After each update. Is called in every step: what takes long belongs elsewhere.
  virtual void on_step(FitContext&) {}
  /// Every log_every_n_steps, with means over all ranks since the last time.
  virtual void on_log(FitContext&, const NamedValues&) {}
  virtual void on_validation_end(FitContext&, const NamedValues&) {}
  virtual void on_epoch_end(FitContext&) {}
  /// Not after an exception.
  virtual void on_fit_end(FitContext&, StopReason) {}
};

struct EarlyStoppingOptions {
  std::string monitor = "val_loss";  ///< a value of the validation
  bool maximize = false;             ///< more is better
  std::int64_t patience = 3;         ///< validations in a row that may be no better
  double min_delta = 0;              ///< by which a value must be better than the best to count
  bool check_finite = true;          ///< ends at once when the value is infinite or NaN
};

/// Ends a training that gets no better.
class EarlyStopping : public Callback, public checkpoint::Stateful {
 public:
  /// Throws UsageError.
  explicit EarlyStopping(const EarlyStoppingOptions& options = {});
  /// Throws UsageError when the validation has no such value, with those that it has.
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
  int top_k = 1;                     ///< so many files are kept
};

/// Keeps the weights of the best validations: FOLDER/best/step-1200-val_loss-0.0832.safetensors. One that is no longer
/// among the best goes when the new one is on the disk. A value that is not finite is never the best. Checkpoints to go
/// on from, with everything, are the Trainer's own.
class ModelCheckpoint : public Callback, public checkpoint::Stateful {
 public:
  /// Throws UsageError.
  explicit ModelCheckpoint(const ModelCheckpointOptions& options = {});
  /// In a run without a folder nothing is kept.
  void on_validation_end(FitContext& fit, const NamedValues& values) override;

  /// The best one; empty when there is none yet.
  std::string best_path() const { return saved_models_.empty() ? "" : saved_models_.front().path; }
  /// Best first.
  std::vector<std::string> paths() const;
  checkpoint::StateDict state_dict() const override;
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  struct SavedModel {
    double value = 0;
    std::string path;
  };
  const ModelCheckpointOptions options_;
  std::vector<SavedModel> saved_models_;  // the best first
};

/// The value with that name. Throws UsageError "`who`: there is no `name` among ...".
double value_of(const NamedValues& values, const std::string& name, const std::string& who);

}  // namespace lockstep::train
