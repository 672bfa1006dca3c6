// The models whose training steps are measured; bench/baselines/models.py has the same models in Python.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep::bench {

/// A model, one batch of random data, and a loss.
class Task {
 public:
  virtual ~Task() = default;
  virtual torch::nn::Module& net() = 0;
  /// Runs the model on the first `batch` samples, at most batch().
  virtual at::Tensor forward(std::int64_t batch) = 0;
  virtual at::Tensor loss(const at::Tensor& output) = 0;
  virtual std::int64_t batch() const = 0;
};

/// Creates mlp-50m, mlp-65m, mlp-6m, transformer-2m or cnn-1m. Throws UsageError for other names.
std::unique_ptr<Task> make_task(const std::string& model);

}  // namespace lockstep::bench
