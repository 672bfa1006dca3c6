// GraphedStep: a training step as a CUDA graph, captured once and then replayed as a whole, without the host overhead
// of each operation. Its CMake target, Lockstep::cuda, links libtorch's CUDA library; programs that do not link this
// target do not load that library.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep::cuda {

struct GraphedStepOptions {
  bool enabled = true;  ///< false: every step runs the body eagerly
  int warmup = 3;       ///< eager steps per set of input shapes before the capture, 1 to 1000; they initialise what is
                        ///< created once, such as an optimizer's state
  int max_graphs = 4;   ///< maximum number of sets of input shapes with a graph, 1 to 1024; steps with further shapes
                        ///< run eagerly, and a warning is logged once
};

struct GraphedStepStats {
  std::int64_t eager = 0;     ///< steps that ran eagerly, including warm-up
  std::int64_t captured = 0;  ///< captured graphs
  std::int64_t replayed = 0;  ///< steps that replayed a graph
};

/// Each call makes one step: it runs the body with the given inputs. On a GPU, there is one graph per set of shapes,
/// strides and dtypes of the inputs: the first `warmup` calls with a set run the body eagerly, the next call captures
/// it, and that call and all later ones replay the graph. On a CPU, and with enabled = false, every call runs the body
/// eagerly, with the same results.
///
///   using Tensors = std::vector<at::Tensor>;
///   lockstep::cuda::GraphedStep step(world.device(), [&](const Tensors& batch) -> Tensors {
///     optimizer.zero_grad();
///     const at::Tensor loss = torch::nll_loss(net->forward(batch[0]), batch[1]);
///     loss.backward();
///     optimizer.step();
///     return {loss.detach()};
///   });
///   for (auto& batch : loader.epoch(0)) last = step({batch.data, batch.target})[0];
///
/// A graph repeats the captured GPU work with the same addresses and numbers; it does not repeat the host's decisions
/// and counts. The body must therefore do the same work in every step. The last two runs before the first replay are
/// compared, and UsageError names what cannot be captured: a number that differs between runs (torch::optim::Adam's
/// step count, a learning rate of torch::optim that a schedule changes), another sequence of operations, tensors on the
/// CPU, values that the host reads (item(), GradScaler::step() with torch::optim), and collectives, including
/// DistributedDataParallel with several ranks, because ranks compare each call on the host. Move these before or after
/// the step. Put an Autocast inside the body. The optimizers of lockstep::optim can be captured: their learning rates
/// and step counts follow the host's in every replay (FusedOptimizer).
///
/// The returned tensors are overwritten by the next step: clone what must be kept. Gradients that are used outside the
/// step must keep their addresses: call zero_grad(set_to_none = false) in the body. Each graph holds the memory of its
/// step. Not thread-safe. Objects on several threads warm up and capture one at a time.
class GraphedStep {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Body = std::function<Tensors(const Tensors& inputs)>;

  /// Throws UsageError for an option outside its range, and for a device that is neither cpu nor cuda.
  GraphedStep(at::Device device, Body body, const GraphedStepOptions& options = {});
  ~GraphedStep();
  GraphedStep(GraphedStep&&) noexcept;

  /// Makes one step. Does not wait for the GPU. Throws UsageError for inputs and bodies that cannot be captured and for
  /// a call inside an Autocast with a cache, and rethrows exceptions of the body unchanged; the step is then
  /// incomplete.
  Tensors operator()(const Tensors& inputs);

  const GraphedStepStats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::cuda
