// recompute(): a part of the forward pass that runs again in backward(), to save memory (activation checkpointing).
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/nn/module_ref.h"

namespace lockstep::nn {

/// Not for users: recompute() for one type of function.
std::vector<at::Tensor> recompute_outputs(
    std::shared_ptr<torch::nn::Module> module,
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> forward,
    const std::vector<at::Tensor>& inputs);

/// Returns call(module, inputs...), an at::Tensor or a std::vector<at::Tensor>, without keeping what its backward()
/// needs: backward() calls it again, with the same random numbers and autocast settings, so gradients have the same
/// bits as without recompute(). A model of N equal blocks, each recomputed, keeps the inputs of N blocks and the
/// intermediate results of one, and computes each forward twice:
///   for (const auto& block : *blocks) x = nn::recompute(*block->as<Block>(), x);
///   x = nn::recompute(mixer, [](MixerImpl& m, const auto& a, const auto& b) { return m.mix(a, b); }, a, b);
///
/// `module` is a module or a handle of one; a module that is passed by reference must exist until backward(), as must
/// what `call` refers to. `call` may use the inputs and the module's parameters and buffers. backward() throws
/// UsageError if it uses another tensor that requires a gradient, whose gradient would be lost, or if its outputs are
/// not those of the first time, and torch's error if an input or a parameter was changed in place since then. A `call`
/// that does so itself is a UsageError at once, and backward() with create_graph is one.
///
/// Buffers that `call` writes, such as BatchNorm's running statistics, are written once: the second call sees those of
/// the moment of backward(), and its changes are undone. So the outputs must not depend on a buffer that has changed.
/// No other thread may draw from torch's default generators meanwhile, as a transform in a loader's worker could
/// (data/sample_rng.h draws from its own). The order of additions, and so the last bit, may differ where an input or
/// weight is used outside the call as well, or a weight twice in it under autocast. A hook on the gradient of a
/// parameter that `call` does not use is called, with an undefined tensor.
///
/// Works with DistributedDataParallel, whose buckets are reduced while earlier blocks are recomputed, and inside
/// another recompute(). Saves the states of the default generators of the CPU and of the inputs' and parameters'
/// devices: not inside the capture of a CUDA graph.
///
/// After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
template <typename M, typename Function, typename... Inputs>
  requires(!std::convertible_to<Function, at::Tensor> && (std::convertible_to<Inputs, at::Tensor> && ...))
auto recompute(M&& module, Function call, const Inputs&... inputs) {
  auto& found = module_of(module);
  using Result = std::decay_t<decltype(call(found, inputs...))>;
  constexpr bool kOneTensor = std::is_same_v<Result, at::Tensor>;
  static_assert(kOneTensor || std::is_same_v<Result, std::vector<at::Tensor>>,
                "recompute(): the function must return an at::Tensor or a std::vector<at::Tensor>");
  auto forward = [&found, call = std::move(call)](const std::vector<at::Tensor>& given) {
    const auto apply = [&]<std::size_t... I>(std::index_sequence<I...>) { return call(found, given[I]...); };
    if constexpr (kOneTensor)
      return std::vector<at::Tensor>{apply(std::index_sequence_for<Inputs...>())};
    else
      return apply(std::index_sequence_for<Inputs...>());
  };
  auto outputs = recompute_outputs(shared_module(module), std::move(forward), {inputs...});
  if constexpr (kOneTensor)
    return std::move(outputs.front());
  else
    return outputs;
}

/// Calls the module's forward().
template <typename M, typename... Inputs>
  requires(std::convertible_to<Inputs, at::Tensor> && ...)
auto recompute(M&& module, const at::Tensor& input, const Inputs&... inputs) {
  return recompute(module, [](auto& found, const auto&... given) { return found.forward(given...); }, input, inputs...);
}

}  // namespace lockstep::nn
