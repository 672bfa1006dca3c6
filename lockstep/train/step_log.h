// What a step of the user's module is told, and what it tells.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "lockstep/train/metrics/metrics.h"

namespace lockstep::train {

/// One batch of this rank.
class StepLog {
 public:
  StepLog(Metrics& metrics, std::string prefix) : metrics_(metrics), prefix_(std::move(prefix)) {}

  std::int64_t epoch = 0;        ///< from 0
  std::int64_t batch = 0;        ///< of this epoch, from 0
  std::int64_t step = 0;         ///< updates made before
  std::int64_t num_samples = 0;  ///< in this batch
  int optimizer = 0;             ///< whose turn it is, when there are several

  /// `mean` over `count` samples of this batch, by default all. What is shown and kept is the mean over the samples of
  /// all ranks and of all batches since the last time. A tensor is not read here.
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

}  // namespace lockstep::train
