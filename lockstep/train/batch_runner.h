// A loader and the step method of a module, with their batch type erased; its errors; and a validation, one pass over
// the batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/train/metrics/metrics.h"

namespace lockstep::training {

/// The position of one batch of this rank.
struct StepLocation {
  std::int64_t epoch = 0;  ///< from 0
  std::int64_t batch = 0;  ///< in this epoch, from 0
  std::int64_t step = 0;   ///< updates so far
};

/// The position of one batch of this rank, and the metrics of its step. Used by one thread.
class StepLog : public StepLocation {
 public:
  StepLog(Metrics& metrics, std::string prefix) : metrics_(metrics), prefix_(std::move(prefix)) {}

  std::int64_t num_samples = 0;  ///< in this batch
  int optimizer = 0;             ///< index of the optimizer that this call is for, when there are several

  /// Logs a mean over `count` samples of this batch, by default all of them. The progress line and the loggers get the
  /// mean over the samples of all ranks and all batches since the previous log. Does not synchronize with the device: a
  /// tensor on it is read later.
  void log(const std::string& name, const at::Tensor& mean, double count = 0) {
    metrics_.add(prefix_ + name, mean, count > 0 ? count : static_cast<double>(num_samples));
  }
  void log(const std::string& name, double mean, double count = 0) {
    metrics_.add(prefix_ + name, mean, count > 0 ? count : static_cast<double>(num_samples));
  }

 private:
  Metrics& metrics_;
  const std::string prefix_;
};

/// Draws batches from a loader and runs the step of the user's module on them. Used by one thread.
class BatchRunner {
 public:
  /// `step` is called with a Batch& and a StepLog& and returns the loss, or void.
  template <typename Batch, typename Step>
  BatchRunner(const data::Loader<Batch>& loader, Step step)
      : loader_(loader.core()),
        step_([step = std::move(step)](void* erased, StepLog& log) -> at::Tensor {
          Batch& batch = *static_cast<Batch*>(erased);
          if constexpr (std::is_void_v<decltype(step(batch, log))>) {
            step(batch, log);
            return {};
          } else {
            return step(batch, log);
          }
        }),
        visitor_([](void* batch, const data::TensorVisitor& visit) {
          data::visit_tensors(*static_cast<Batch*>(batch), visit);
        }) {}

  data::LoaderCore& loader() const { return *loader_; }
  /// Returns the number of batches of this rank in a whole epoch.
  std::int64_t batches_per_epoch() const { return static_cast<std::int64_t>(loader_->batches_per_epoch()); }
  void begin_epoch(std::uint64_t epoch) {
    end_epoch();
    batches_ = loader_->start(epoch);
  }
  /// Draws the next batch of the current epoch. Blocks until the loader has it. Returns false after the last one.
  bool fetch_next() {
    batch_ = nullptr;  // the next batch can reuse its memory
    batch_ = batches_->next();
    return batch_ != nullptr;
  }
  /// Stops the loader's threads if the epoch is not finished.
  void end_epoch() {
    batch_.reset();
    batches_.reset();
  }
  /// Of the current batch: the number of its samples, and their indices in the dataset.
  std::int64_t num_samples() const { return static_cast<std::int64_t>(batches_->num_samples()); }
  std::vector<std::size_t> indices() const { return batches_->indices(); }
  /// Returns the number of batches of the current epoch, drawn or not: fewer than batches_per_epoch() after the
  /// loader's position inside the epoch has been restored.
  std::int64_t batches_this_epoch() const { return static_cast<std::int64_t>(batches_->size()); }
  /// Runs the module's step on the current batch and returns its loss, or an undefined tensor when the step returns
  /// void. Throws a StepError, which calls the step `what`, with the step's exception nested; a CommError passes
  /// unchanged.
  at::Tensor run_step(const char* what, StepLog& log) const;
  /// Converts the floating-point tensors of the current batch to `dtype`, to match weights in lower precision.
  void cast_batch(at::ScalarType dtype) const {
    visitor_(batch_.get(), [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
    });
  }

 private:
  const std::shared_ptr<data::LoaderCore> loader_;
  const std::function<at::Tensor(void* batch, StepLog& log)> step_;
  const data::BatchVisitor visitor_;
  std::shared_ptr<data::BatchIterator> batches_;
  std::shared_ptr<void> batch_;
};

/// Thrown when training_step() or validation_step() throws. what() is "training_step() of step 57 (epoch 1, batch 6,
/// samples 3, 17, 88): " and the first line of the original message; the original exception is nested. The cause is
/// that of the original exception if that is a lockstep::Error, otherwise kRankExited.
class StepError : public base::Error {
 public:
  using base::Error::Error;
};

/// Describes the current batch: "training_step() of step 57 (epoch 1, batch 6, samples 3, 17, 88)". At most the first
/// 16 samples are listed. The step is the one that the batch belongs to, counted from 1.
std::string describe_batch(const std::string& what, const StepLocation& location, const BatchRunner& batches);

/// Runs validation_step() on the first `num_batches` batches of this rank and returns means over all ranks of the
/// values that it logs, and of the loss that it returns, as "val_loss". Runs without gradients and with the module in
/// eval() mode; the previous mode of each submodule is restored, including after an exception. `location`: the epoch
/// and step after which it runs. Collective; it waits for the other ranks once, at its end.
NamedValues validate(const comm::Group& world, torch::nn::Module& module, BatchRunner& batches,
                     std::int64_t num_batches, const amp::Precision& precision, const StepLocation& location);

/// Throws UsageError for a loader that repeats samples to give all ranks the same number: means would count them twice.
void require_exact_sharding(const BatchRunner& batches);

}  // namespace lockstep::training
