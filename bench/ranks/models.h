// The models whose training steps are measured; bench/baselines/models.py has the same in Python.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep::bench {

/// A model, one batch of made-up data, and what is minimised.
class Task {
 public:
  virtual ~Task() = default;
  virtual torch::nn::Module& net() = 0;
  /// The first `batch` samples of the data; at most batch().
  virtual at::Tensor forward(std::int64_t batch) = 0;
  virtual at::Tensor loss(const at::Tensor& output) = 0;
  virtual std::int64_t batch() const = 0;
};

/// mlp-50m, mlp-65m, mlp-6m, transformer-2m or cnn-1m; throws UsageError for others.
std::unique_ptr<Task> make_task(const std::string& model);

}  // namespace lockstep::bench
