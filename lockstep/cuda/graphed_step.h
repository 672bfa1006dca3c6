// A training step as a CUDA graph: recorded once, and then started as a whole, without the host's part of each
// operation. Target Lockstep::cuda, which links libtorch's library for CUDA; a program that does not use it loads
// nothing of that.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep::cuda {

struct GraphedStepOptions {
  bool enabled = true;  ///< false: each step is the body's, carried out as it is
  int warmup = 3;  ///< steps with inputs of the same shapes before they are captured, 1 to 1000: they make what is made
                   ///< once, such as an optimizer's state
  int max_graphs = 4;  ///< for inputs of different shapes, 1 to 1024; further ones are carried out as they are, and a
                       ///< warning says so once
};

struct GraphedStepStats {
  std::int64_t eager = 0;     ///< steps that were carried out as they are, those of the warm-up among them
  std::int64_t captured = 0;  ///< graphs
  std::int64_t replayed = 0;  ///< steps by a graph
};

/// Each call is one step: the body's, with these inputs. With a GPU the first `warmup` calls carry it out as it is, the
/// next captures it, and from that call on its graph is replayed. Shapes, strides and dtypes of the inputs choose the
/// graph. On a CPU, and with enabled = false, the body is all there is: the same results.
///
///   lockstep::cuda::GraphedStep step(world.device(), [&](const std::vector<at::Tensor>& batch) ->
///   std::vector<at::Tensor> {
///     optimizer.zero_grad();
///     const at::Tensor loss = torch::nll_loss(net->forward(batch[0]), batch[1]);
///     loss.backward();
///     optimizer.step();
///     return {loss.detach()};
///   });
///   for (auto& batch : loader.epoch(0)) last = step({batch.data, batch.target})[0];
///
/// A graph is what the GPU did, with the addresses and numbers of then: what the host decides or counts is frozen in
/// it. So the body must do the same each time, and these are refused with a UsageError that names them, by comparing
/// the last two runs before the first replay: a number that differs from run to run (torch::optim::Adam's count of
/// steps, a rate that a schedule moves), another sequence of operations, tensors on the CPU, values that are read on
/// the host (item(), GradScaler::step()), operations of a group and DistributedDataParallel of several ranks, whose
/// ranks agree on each call before it. These go before or after the step. An Autocast belongs inside the body.
///
/// What the step returns stays where it is and is overwritten by the next one: clone what is kept. Gradients that are
/// used outside must stay where they are too: zero_grad(set_to_none = false) in the body. Each graph keeps the memory
/// that its step needs. One thread uses it, and one captures at a time in a process.
class GraphedStep {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Body = std::function<Tensors(const Tensors& inputs)>;

  /// Throws UsageError for an option outside its range, and for a device that is neither cpu nor cuda.
  GraphedStep(at::Device device, Body body, const GraphedStepOptions& options = {});
  ~GraphedStep();
  GraphedStep(GraphedStep&&) noexcept;

  /// Does not wait for the GPU. Throws UsageError; what the body throws comes out as it is. When it throws, the step
  /// has not been made, or not to its end.
  Tensors operator()(const Tensors& inputs);

  const GraphedStepStats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::cuda
