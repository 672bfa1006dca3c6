// Tests recompute() on one thread; tests/conformance/nn has it in a DistributedDataParallel.
#include "lockstep/nn/recompute.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "examples/03_gpt/gpt.h"
#include "lockstep/amp/autocast.h"
#include "tests/support/temp_dir.h"

namespace lockstep::nn {
namespace {

using ::testing::HasSubstr;

/// A block with dropout, a residual connection, running statistics and a parameter that forward() does not use.
struct MlpBlockImpl : torch::nn::Module {
  explicit MlpBlockImpl(std::int64_t width)
      : first(register_module("first", torch::nn::Linear(width, 4 * width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(4 * width))),
        second(register_module("second", torch::nn::Linear(4 * width, width))),
        unused(register_module("unused", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return x + torch::dropout(second(torch::gelu(norm(first(x)))), 0.3, is_training());
  }
  std::vector<at::Tensor> split(const at::Tensor& x, const at::Tensor& y) { return forward(x + y).chunk(2, 1); }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear second, unused;
  int calls = 0;
};
TORCH_MODULE(MlpBlock);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(std::int64_t width = 8, int depth = 3)
      : blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int i = 0; i < depth; ++i) blocks->push_back(MlpBlock(width));
  }
  at::Tensor forward(at::Tensor x, bool recomputes) {
    for (const auto& block : *blocks) {
      auto& one = *block->as<MlpBlock>();
      x = recomputes ? recompute(one, x) : one.forward(x);
    }
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Stack);

Stack make_stack() {
  torch::manual_seed(3);
  return Stack();
}

/// What a step leaves: the gradients, those of the input last, the buffers, and the next random numbers.
std::vector<at::Tensor> step(Stack& net, bool recomputes, std::optional<at::ScalarType> autocast = {}) {
  torch::manual_seed(5);
  net->zero_grad();
  const at::Tensor x = torch::randn({16, 8}).requires_grad_();
  at::Tensor loss;
  {
    const amp::Autocast precision({.dtype = autocast, .enabled = autocast.has_value()});
    loss = net->forward(x, recomputes).to(at::kFloat).pow(2).sum();
  }
  const at::Tensor between = torch::rand({3});  // draws between forward() and backward()
  loss.backward();
  std::vector<at::Tensor> result = {loss.detach()};
  for (const auto& p : net->parameters()) result.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  for (const auto& b : net->buffers()) result.push_back(b.clone());
  result.insert(result.end(), {x.grad(), between, torch::rand({3})});
  return result;
}

void expect_same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (a[i].defined()) {
      EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
    }
  }
}

TEST(Recompute, StepHasTheSameBits) {
  for (const auto autocast : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)})
    for (const bool training : {true, false}) {
      Stack with = make_stack(), without = make_stack();
      with->train(training);
      without->train(training);
      for (int i = 0; i < 2; ++i) expect_same_bits(step(with, true, autocast), step(without, false, autocast));
      EXPECT_EQ((*with->blocks)[1]->as<MlpBlock>()->calls, 4);  // each step twice
    }
}

TEST(Recompute, KeepsNothingWithoutGradients) {
  Stack net = make_stack();
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(net->forward(torch::randn({4, 8}), true).requires_grad());
  for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST(Recompute, FrozenParametersAndInputsWithoutGradient) {
  Stack with = make_stack(), without = make_stack();
  for (Stack* net : {&with, &without})
    for (auto& p : (*net)->named_parameters())
      if (p.key().find("first") != std::string::npos) p.value().requires_grad_(false);
  const at::Tensor x = torch::randn({4, 8});
  torch::manual_seed(1);
  with->forward(x, true).sum().backward();
  torch::manual_seed(1);
  without->forward(x, false).sum().backward();
  const auto a = with->parameters(), b = without->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].grad().defined(), b[i].grad().defined());
    if (a[i].grad().defined()) {
      EXPECT_TRUE(torch::equal(a[i].grad(), b[i].grad()));
    }
  }
}

TEST(Recompute, SeveralInputsAndOutputs) {
  MlpBlock block(8), plain(8);
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    plain->parameters()[i].data().copy_(block->parameters()[i].data());
  const auto run = [](MlpBlock& module, bool recomputes) {
    torch::manual_seed(2);
    const at::Tensor x = torch::randn({4, 8}).requires_grad_(), y = torch::randn({4, 8});
    const auto split = [](MlpBlockImpl& b, const at::Tensor& s, const at::Tensor& t) { return b.split(s, t); };
    const auto parts = recomputes ? recompute(module, split, x, y) : module->split(x, y);
    EXPECT_EQ(parts.size(), 2U);
    parts[1].pow(2).sum().backward();  // the first has no gradient
    EXPECT_FALSE(y.grad().defined());
    return std::vector<at::Tensor>{x.grad(), module->first->weight.grad(), module->second->bias.grad()};
  };
  expect_same_bits(run(block, true), run(plain, false));
}

TEST(Recompute, InsideAnother) {
  Stack with = make_stack(), without = make_stack();
  torch::manual_seed(1);
  const at::Tensor x = torch::randn({4, 8});
  torch::manual_seed(2);
  recompute(with, [](StackImpl& net, const at::Tensor& in) { return net.forward(in, true); }, x).sum().backward();
  torch::manual_seed(2);
  without->forward(x, false).sum().backward();
  EXPECT_TRUE(torch::equal((*with->blocks)[0]->as<MlpBlock>()->first->weight.grad(),
                           (*without->blocks)[0]->as<MlpBlock>()->first->weight.grad()));
}

TEST(Recompute, HooksOfParametersRunOnce) {
  MlpBlock block(8);
  int calls = 0;
  block->first->weight.register_hook([&](const at::Tensor& g) {
    ++calls;
    return g * 2;
  });
  torch::manual_seed(4);
  const at::Tensor x = torch::randn({4, 8});
  torch::manual_seed(4);
  recompute(block, x).sum().backward();
  const at::Tensor with = block->first->weight.grad().clone();
  EXPECT_EQ(calls, 1);
  block->zero_grad();
  torch::manual_seed(4);
  block->forward(x).sum().backward();
  EXPECT_TRUE(torch::equal(with, block->first->weight.grad()));
}

TEST(Recompute, OwnsTheModuleOfAHandle) {
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  at::Tensor y;
  {
    MlpBlock block(8);
    y = recompute(block, x);
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Recompute, TiedParametersCountOnce) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      register_module("one", layer);
      register_module("two", layer);
    }
    at::Tensor forward(const at::Tensor& x) { return layer(torch::tanh(layer(x))); }
    torch::nn::Linear layer{4, 4};
  };
  TiedImpl tied;
  const at::Tensor x = torch::randn({2, 4});
  recompute(tied, x).sum().backward();
  const at::Tensor with = tied.layer->weight.grad().clone();
  tied.zero_grad();
  tied.forward(x).sum().backward();
  EXPECT_TRUE(torch::equal(with, tied.layer->weight.grad()));
}

TEST(Recompute, OutputWithoutGradientLeavesItsParametersAlone) {
  torch::nn::ModuleDict heads(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
      {"policy", torch::nn::Linear(4, 2).ptr()}, {"value", torch::nn::Linear(4, 1).ptr()}});
  auto& policy = *heads["policy"]->as<torch::nn::Linear>();
  auto& value = *heads["value"]->as<torch::nn::Linear>();
  const auto both = [&](torch::nn::ModuleDictImpl&, const at::Tensor& x) {
    return std::vector<at::Tensor>{policy.forward(x), value.forward(x).sqrt()};
  };
  recompute(heads, both, torch::randn({2, 4}))[0].sum().backward();
  EXPECT_TRUE(policy.weight.grad().defined());
  EXPECT_FALSE(value.weight.grad().defined());
}

TEST(Recompute, OutputMayBeAnInput) {
  torch::nn::Sequential identity(torch::nn::Dropout(0.5));
  identity->eval();
  const at::Tensor x = torch::randn({3}).requires_grad_();
  recompute(identity, x * 2).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 2.0)));
}

TEST(Recompute, RejectsAFunctionThatChangesItsInput) {
  MlpBlock block(8);
  const auto normalize = [](MlpBlockImpl& b, const at::Tensor& x) { return b.forward(at::Tensor(x).sub_(1)); };
  EXPECT_THROW(recompute(block, normalize, torch::randn({4, 8})), base::UsageError);
}

TEST(Recompute, WorksWithoutParameters) {
  torch::nn::Sequential relu(torch::nn::ReLU{});
  const at::Tensor x = torch::tensor({-1.0, 2.0}).requires_grad_();
  recompute(relu, x).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({0.0, 1.0})));
}

TEST(Recompute, GraphMayBeKept) {
  MlpBlock block(8);
  block->eval();
  const at::Tensor y = recompute(block, torch::randn({4, 8})).sum();
  y.backward({}, /*retain_graph=*/true);
  const at::Tensor first = block->first->weight.grad().clone();
  y.backward();
  EXPECT_TRUE(torch::equal(block->first->weight.grad(), first * 2));
}

TEST(Recompute, RejectsTensorsThatAreNeitherInputsNorParameters) {
  MlpBlock block(8);
  const at::Tensor foreign = torch::randn({8}).requires_grad_();
  const at::Tensor y = recompute(
      block, [&](MlpBlockImpl& b, const at::Tensor& in) { return b.forward(in) * foreign; }, torch::randn({4, 8}));
  EXPECT_THAT(tests::thrown<base::UsageError>([&] { y.sum().backward(); }).what(), HasSubstr("size [8]"));
  EXPECT_THROW(recompute(block, at::Tensor()), base::UsageError);
}

TEST(Recompute, RejectsAFunctionThatReturnsSomethingElse) {
  MlpBlock block(8);
  int calls = 0;
  const auto y = recompute(
      block,
      [&](MlpBlockImpl& b, const at::Tensor& in) {
        const at::Tensor all = b.forward(in);
        return calls++ == 0 ? all : all.narrow(0, 0, 1);
      },
      torch::randn({4, 8}));
  EXPECT_THAT(tests::thrown<base::UsageError>([&] { y.sum().backward(); }).what(), HasSubstr("other sizes"));
}

TEST(Recompute, RejectsChangesInPlaceAndSecondDerivatives) {
  MlpBlock block(8);
  const at::Tensor y = recompute(block, torch::randn({4, 8})).sum();
  {
    const at::NoGradGuard no_grad;
    block->first->weight.add_(1);
  }
  EXPECT_THROW(y.backward(), c10::Error);
  const at::Tensor z = recompute(block, torch::randn({4, 8})).sum();
  EXPECT_THROW(torch::autograd::grad({z}, {block->first->weight}, {}, true, /*create_graph=*/true), base::UsageError);
}

/// Counts the bytes that torch has allocated on the CPU.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data) sizes_[data] = bytes;
    now_ += bytes;
    peak_ = std::max(peak_, now_);
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  static std::size_t peak_while(const std::function<void()>& run) {
    now_ = peak_ = 0;
    run();
    return peak_;
  }

 private:
  static void release(void* data) {
    if (!data) return;
    now_ -= std::min(now_, std::exchange(sizes_[data], 0));
    c10::free_cpu(data);
  }
  inline static std::map<void*, std::size_t> sizes_;
  inline static std::size_t now_ = 0, peak_ = 0;
};

TEST(Recompute, GptNeedsHalfOfTheMemory) {
  static CountingAllocator counting;  // tensors may outlive the test
  c10::Allocator* const before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, 1);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // the allocator counts without a lock
  for (const double dropout : {0.0, 0.1}) {
    std::size_t peak[2];
    std::vector<at::Tensor> gradients[2];
    for (const bool recomputes : {false, true}) {
      torch::manual_seed(1);
      Gpt gpt(GptOptions{.block = 256, .width = 64, .layers = 12, .dropout = dropout, .recompute = recomputes});
      const at::Tensor text = torch::randint(256, {4, 256}, at::kLong);
      gpt->loss(text, text).backward();
      gpt->zero_grad();
      torch::manual_seed(2);
      peak[recomputes] = CountingAllocator::peak_while([&] { gpt->loss(text, text).backward(); });
      for (const auto& p : gpt->parameters()) gradients[recomputes].push_back(p.grad());
    }
    EXPECT_LE(peak[1] * 2, peak[0]);
    std::cout << "dropout " << dropout << ": peak of a step " << peak[1] << " bytes, without recompute " << peak[0]
              << std::endl;
    expect_same_bits(gradients[0], gradients[1]);
  }
  c10::SetCPUAllocator(before, 1);
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace lockstep::nn
