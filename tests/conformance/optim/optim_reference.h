// References and models that the suites of fused optimizers share.
#pragma once

#include <functional>

#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests {

/// Returns whether all ranks share one copy of parameters and state.
inline bool on_shm() { return world().size() > 1 && world().transport() == "shm" && world().device().is_cpu(); }

inline void backward(MlpImpl& net, int rank, int step) {
  net.forward(batch_of(rank, step, {4, 7}, net.first->weight.scalar_type())).pow(2).sum().backward();
}

/// Sets the gradients of `reference` to the means of those that all ranks compute with its parameters.
template <typename Net>
void set_mean_gradients(Net& reference, const std::function<void(Net&, int rank)>& run) {
  const auto means = mean_over_ranks([&](int rank) {
    reference.zero_grad();
    run(reference, rank);
    return gradients(reference);
  });
  const auto parameters = reference.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    parameters[i].mutable_grad() = means[i].defined() ? means[i].clone() : at::Tensor();
}

inline void expect_equal(torch::nn::Module& got, torch::nn::Module& expected, double tolerance) {
  const auto named = got.named_parameters();
  const auto expected_values = expected.parameters();
  for (std::size_t i = 0; i < expected_values.size(); ++i) {
    EXPECT_TRUE(torch::allclose(named[i].value(), expected_values[i], tolerance, tolerance))
        << named[i].key() << " differs by " << (named[i].value() - expected_values[i]).abs().max().item<double>();
    EXPECT_TRUE(same_bits(named[i].value().detach())) << named[i].key();
  }
}

/// A network with parameters of many chunks, a transposed one, and two that share a storage.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    torch::manual_seed(3);
    wide = register_module("wide", torch::nn::Linear(500, 1100));
    wide->to(world().device());
    odd = register_parameter("odd", torch::randn({1100, 301}).to(world().device()).t());
    const at::Tensor both = torch::randn({2, 301}).to(world().device());
    left = register_parameter("left", both[0]);
    right = register_parameter("right", both[1]);
  }
  at::Tensor loss(int rank, int step) {
    return (torch::mm(torch::relu(wide->forward(batch_of(rank, step, {4, 500}))), odd.t()) * left + right)
               .pow(2)
               .mean() *
           1e-3;
  }
  torch::nn::Linear wide{nullptr};
  at::Tensor odd, left, right;
};

}  // namespace lockstep::tests
