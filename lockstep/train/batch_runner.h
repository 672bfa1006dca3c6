// A loader and the step method of a module, with their batch type erased; and a validation, one pass over the batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/precision.h"
#include "lockstep/data/loader.h"
#include "lockstep/train/metrics/metrics.h"

namespace lockstep::training {

/// The position of one batch of this rank, and the metrics of its step. Used by one thread.
class StepLog {
 public:
  StepLog(Metrics& metrics, std::string prefix) : metrics_(metrics), prefix_(std::move(prefix)) {}

  std::int64_t epoch = 0;        ///< from 0
  std::int64_t batch = 0;        ///< in this epoch, from 0
  std::int64_t step = 0;         ///< updates so far
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
  virtual ~BatchRunner() = default;
  /// Returns the number of batches of this rank in a whole epoch.
  virtual std::int64_t batches_per_epoch() const = 0;
  /// Returns whether all ranks together draw each sample at most once per epoch.
  virtual bool is_exact() const = 0;
  virtual void begin_epoch(std::uint64_t epoch) = 0;
  /// Draws the next batch of the current epoch. Blocks until the loader has it. Returns false after the last one.
  virtual bool fetch_next() = 0;
  /// Stops the loader's threads if the epoch is not finished.
  virtual void end_epoch() = 0;
  virtual std::int64_t num_samples() const = 0;          ///< of the current batch
  virtual std::vector<std::size_t> indices() const = 0;  ///< of its samples in the dataset
  /// Returns the number of batches of the current epoch, drawn or not: fewer than batches_per_epoch() after the
  /// loader's position inside the epoch has been restored.
  virtual std::int64_t batches_this_epoch() const = 0;
  virtual std::int64_t batch_size() const = 0;  ///< of the loader
  /// The loader, whose state is its position.
  virtual checkpoint::Stateful& loader() = 0;
  /// Runs the module's step on the current batch and returns its loss, or an undefined tensor when the step returns
  /// void.
  virtual at::Tensor run_step(StepLog& log) = 0;
  /// Converts the floating-point tensors of the current batch to `dtype`, to match weights in lower precision.
  virtual void cast_batch(at::ScalarType dtype) = 0;
};

template <typename Batch, typename Step>
class LoaderBatchRunner final : public BatchRunner {
 public:
  LoaderBatchRunner(data::Loader<Batch> loader, Step step) : loader_(std::move(loader)), step_(std::move(step)) {}

  std::int64_t batches_per_epoch() const override { return static_cast<std::int64_t>(loader_.batches_per_epoch()); }
  bool is_exact() const override { return loader_.is_exact(); }
  void begin_epoch(std::uint64_t epoch) override {
    end_epoch();
    epoch_.emplace(loader_.epoch(epoch));
  }
  bool fetch_next() override {
    if (iterator_)
      ++*iterator_;
    else
      iterator_.emplace(epoch_->begin());
    return *iterator_ != std::default_sentinel;
  }
  void end_epoch() override {
    iterator_.reset();
    epoch_.reset();
  }
  std::int64_t num_samples() const override { return static_cast<std::int64_t>(epoch_->num_samples()); }
  std::vector<std::size_t> indices() const override { return epoch_->indices(); }
  std::int64_t batches_this_epoch() const override { return static_cast<std::int64_t>(epoch_->size()); }
  std::int64_t batch_size() const override { return loader_.options().batch_size; }
  checkpoint::Stateful& loader() override { return loader_; }
  at::Tensor run_step(StepLog& log) override {
    if constexpr (std::is_void_v<decltype(step_(**iterator_, log))>) {
      step_(**iterator_, log);
      return {};
    } else {
      return step_(**iterator_, log);
    }
  }
  void cast_batch(at::ScalarType dtype) override {
    data::visit_tensors(**iterator_, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
    });
  }

 private:
  data::Loader<Batch> loader_;
  Step step_;
  std::optional<data::Epoch<Batch>> epoch_;
  std::optional<data::LoaderIterator<Batch>> iterator_;
};

template <typename Batch, typename Step>
std::unique_ptr<BatchRunner> make_batch_runner(data::Loader<Batch> loader, Step step) {
  return std::make_unique<LoaderBatchRunner<Batch, Step>>(std::move(loader), std::move(step));
}

/// The epoch and step after which a validation runs.
struct ValidationLocation {
  std::int64_t epoch = 0, step = 0;
};

/// Runs validation_step() on the first `num_batches` batches of this rank and returns means over all ranks of the
/// values that it logs, and of the loss that it returns, as "val_loss". Runs without gradients and with the module in
/// eval() mode; the previous mode of each submodule is restored, including after an exception. Collective; it waits for
/// the other ranks once, at its end.
NamedValues validate(const comm::Group& world, torch::nn::Module& module, BatchRunner& batches,
                     std::int64_t num_batches, const amp::Precision& precision, ValidationLocation location);

/// Throws UsageError for a loader that repeats samples to give all ranks the same number: means would count them twice.
void require_exact_sharding(const BatchRunner& batches);

}  // namespace lockstep::training
