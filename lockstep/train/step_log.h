// StepLog, the argument of a user's training_step() and validation_step(): the position of the batch, and logging.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

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

}  // namespace lockstep::training
