// Models and references that the DDP suites share. Parameters and batches are on the device of the rank: the suites
// also run on GPUs (bench/gpu/suites_stage.py).
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/group.h"
#include "lockstep/ddp/ddp.h"
#include "tests/support/rank_main.h"

namespace lockstep::tests {

/// A network of two layers with odd numbers of elements, so that no parameter is aligned by chance.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int in = 7, int hidden = 13, int out = 5)
      : first(register_module("first", torch::nn::Linear(in, hidden))),
        second(register_module("second", torch::nn::Linear(hidden, out))) {
    to(world().device());
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Mlp);

/// A network of a trunk and several heads. A forward uses at most one head.
struct MultiHeadImpl : torch::nn::Module {
  MultiHeadImpl() {
    trunk = register_module("trunk", torch::nn::Linear(6, 6));
    for (int i = 0; i < 3; ++i) heads.push_back(register_module("head" + std::to_string(i), torch::nn::Linear(6, 2)));
  }
  at::Tensor forward(const at::Tensor& x, int head) {
    const at::Tensor h = torch::relu(trunk(x));
    return head < 0 ? h : heads[static_cast<std::size_t>(head)](h);
  }
  torch::nn::Linear trunk{nullptr};
  std::vector<torch::nn::Linear> heads;
};
TORCH_MODULE(MultiHead);

/// Runs the forward of a layer again in backward(), and then a nested backward(), as gradient checkpointing does.
/// `module` is the address of the LinearImpl.
struct CheckpointedLinear : torch::autograd::Function<CheckpointedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t module) {
    context->save_for_backward({x});
    context->saved_data["module"] = module;
    const at::NoGradGuard no_grad;
    return torch::tanh((*reinterpret_cast<torch::nn::LinearImpl*>(module)).forward(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const at::AutoGradMode grad(true);
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* module = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["module"].toInt());
    torch::tanh(module->forward(x)).backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

/// Returns the batch of rank `rank` in `step`. It depends only on the arguments, so each rank can compute the batches
/// of all ranks.
inline at::Tensor batch_of(int rank, int step, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  const auto seed = static_cast<std::uint64_t>(1000 * step + rank + 1);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::kDouble).to(world().device(), dtype);
}

inline std::vector<at::Tensor> gradients(torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters()) all.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  return all;
}

/// Copies parameters and buffers to another module of the same type.
inline void copy_values(torch::nn::Module& from, torch::nn::Module& to) {
  const at::NoGradGuard no_grad;
  const auto source = from.named_parameters();
  for (auto& item : to.named_parameters()) item.value().copy_(source[item.key()]);
  const auto buffers = from.named_buffers();
  for (auto& item : to.named_buffers()) item.value().copy_(buffers[item.key()]);
}

/// Returns whether `tensor` holds the same bits on all ranks. Collective.
inline bool same_bits(const at::Tensor& tensor) {
  const at::Tensor mine = tensor.contiguous().flatten().view(at::kByte);
  if (mine.numel() == 0) return true;
  at::Tensor all = at::empty({world().size() * mine.numel()}, mine.options());
  world().all_gather(all, mine);
  for (int r = 1; r < world().size(); ++r)
    if (!torch::equal(all.narrow(0, 0, mine.numel()), all.narrow(0, r * mine.numel(), mine.numel()))) return false;
  return true;
}

/// Returns the means over all ranks of the tensors that `local(rank)` returns, added in rank order in double.
template <typename Local>
std::vector<at::Tensor> mean_over_ranks(const Local& local) {
  std::vector<at::Tensor> sums;
  std::vector<at::ScalarType> dtypes;
  for (int rank = 0; rank < world().size(); ++rank) {
    const std::vector<at::Tensor> one = local(rank);
    sums.resize(one.size());
    dtypes.resize(one.size(), at::kFloat);
    for (std::size_t i = 0; i < one.size(); ++i) {
      if (!one[i].defined()) continue;
      dtypes[i] = one[i].scalar_type();
      const at::Tensor value = one[i].to_dense().to(at::kDouble);
      sums[i] = sums[i].defined() ? sums[i] + value : value;
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i)
    if (sums[i].defined()) sums[i] = (sums[i] / world().size()).to(dtypes[i]);
  return sums;
}

/// Expects that the gradients equal `expected` within rounding of their dtype, are undefined where it is undefined, and
/// have the same bits on all ranks. Collective.
inline void expect_gradients(torch::nn::Module& module, const std::vector<at::Tensor>& expected) {
  const auto named = module.named_parameters();
  ASSERT_EQ(named.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::string& name = named[i].key();
    const at::Tensor& got = named[i].value().grad();
    ASSERT_EQ(got.defined(), expected[i].defined()) << name;
    if (!got.defined()) continue;
    const at::Tensor dense = got.to_dense();
    const double tolerance = dense.scalar_type() == at::kBFloat16 ? 3e-2
                             : dense.scalar_type() == at::kHalf   ? 4e-3
                                                                  : 2e-6;
    EXPECT_TRUE(torch::allclose(dense.to(at::kDouble), expected[i].to(at::kDouble), tolerance, tolerance))
        << name << "\ngot\n"
        << dense << "\nexpected\n"
        << expected[i];
    EXPECT_TRUE(same_bits(dense)) << name;
  }
}

constexpr auto kErrorLimit = std::chrono::seconds(5);

/// Runs `call`, which must throw an Error of `cause` within `limit`. Its text must contain each of `words`.
template <typename Call>
void expect_error(base::Cause cause, const std::vector<std::string>& words, const Call& call,
                  std::chrono::steady_clock::duration limit = kErrorLimit) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    call();
    ADD_FAILURE() << "rank " << world().rank() << ": nothing was thrown";
  } catch (const base::Error& error) {
    EXPECT_EQ(name(error.cause()), name(cause)) << error.what();
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "\"" << word << "\" is not in: " << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, limit);
}

}  // namespace lockstep::tests
