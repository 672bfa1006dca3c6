// Tests of modules whose tensors are replaced, frozen or unfrozen after DistributedDataParallel was made, and of
// unusual dtypes.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/ddp/test_models.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::ddp_modules_test {
namespace {

using base::UsageError;
using ddp::DistributedDataParallel;

void forward_backward(Mlp& net, int rank, int step) {
  const at::Tensor x = batch_of(rank, step, {4, 7}, net->first->weight.scalar_type());
  net->forward(x).pow(2).mean().backward();
}

/// The gradients of a copy of `net` for the batch of `rank`.
std::vector<at::Tensor> local_gradients(Mlp& net, int rank, int step) {
  Mlp alone;
  copy_values(*net, *alone);
  forward_backward(alone, rank, step);
  return gradients(*alone);
}

/// Runs backward() and expects the means over the ranks.
void expect_means(Mlp& net, int step) {
  const auto expected = mean_over_ranks([&](int rank) { return local_gradients(net, rank, step); });
  net->zero_grad();
  forward_backward(net, world().rank(), step);
  expect_gradients(*net, expected);
}

/// Loads the values of another network, which are the same on all ranks, by torch::load().
void load_by_torch(Mlp& net) {
  torch::manual_seed(9);
  Mlp other;
  std::stringstream stream;
  torch::save(other, stream);
  torch::load(net, stream);
}

TEST(DdpModules, TorchLoadBeforeTheFirstStepAndInTheMiddle) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  load_by_torch(net);
  for (int step = 0; step < 4; ++step) {
    expect_means(net, step);
    if (step == 2) load_by_torch(net);
  }
}

// Where ranks share the parameters' memory, which torch::load() replaces, the optimizer refuses to go on.
TEST(DdpModules, TorchLoadWithAFusedOptimizer) {
  if (world().transport() == "hierarchy") return;  // only some ranks share memory, and the first error ends the job
  Mlp net, alone;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  torch::optim::SGD reference(alone->parameters(), 0.1);
  copy_values(*net, *alone);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      load_by_torch(net);
      load_by_torch(alone);
    }
    optimizer.zero_grad();
    forward_backward(net, world().rank(), step);
    try {
      optimizer.step();
    } catch (const UsageError& error) {
      EXPECT_GE(step, 3);
      EXPECT_NE(std::string(error.what()).find("memory of parameter first.weight has changed"), std::string::npos);
      EXPECT_NE(error.hint().find("lockstep::load"), std::string::npos) << error.hint();
      return;
    }
    reference.zero_grad();
    for (int rank = 0; rank < world().size(); ++rank)
      (alone->forward(batch_of(rank, step, {4, 7})).pow(2).mean() / world().size()).backward();
    reference.step();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(torch::allclose(net->parameters()[i], alone->parameters()[i], 1e-4, 1e-5)) << step << " " << i;
  }
}

/// Expects that `call` throws a UsageError whose text contains `words`.
void expect_usage_error(const std::string& words, const std::function<void()>& call) {
  EXPECT_THAT(tests::message_of<UsageError>(call), ::testing::HasSubstr(words));
}

/// Makes a DistributedDataParallel of `net`, trains a step if `trains`, then calls `change`. The next backward() must
/// fail with `words`.
template <typename Net>
void expect_refused(Net& net, const std::string& words, const std::function<void()>& change,
                    const std::function<void()>& run) {
  DistributedDataParallel ddp(net, world());
  run();
  change();
  expect_usage_error(words, run);
}

TEST(DdpModules, AnotherDtypeIsRefused) {
  Mlp net;
  expect_refused(
      net, "parameter first.weight was changed from Float[13, 7] on cpu to Double[13, 7] on cpu",
      [&] { net->to(at::kDouble); }, [&] { forward_backward(net, world().rank(), 1); });
}

TEST(DdpModules, AnotherDtypeBetweenBackwardAndStepIsRefused) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  forward_backward(net, world().rank(), 1);
  net->to(at::kDouble);
  expect_usage_error("parameter first.weight", [&] { optimizer.step(); });
}

TEST(DdpModules, ReplacedAddedAndRemovedParametersAreRefused) {
  const auto run = [](Mlp& net) { forward_backward(net, world().rank(), 1); };
  Mlp replaced, added, removed;
  expect_refused(
      replaced, "parameter second.weight was replaced by another tensor",
      [&] { replaced->second = replaced->replace_module("second", torch::nn::Linear(13, 5)); }, [&] { run(replaced); });
  expect_refused(
      added, "parameter extra was added", [&] { added->register_parameter("extra", torch::ones({2})); },
      [&] { run(added); });
  expect_refused(
      removed, "parameter second.weight was removed", [&] { removed->unregister_module("second"); },
      [&] { run(removed); });
}

/// Two names for one weight.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    encoder = register_parameter("encoder", torch::ones({3, 3}));
    register_parameter("decoder", encoder);
    scale = register_buffer("scale", torch::ones({3}));
  }
  void untie() { parameters_["decoder"] = encoder.detach().clone().requires_grad_(); }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x.matmul(encoder)).matmul(parameters_["decoder"]); }
  at::Tensor encoder, scale;
};
TORCH_MODULE(Tied);

TEST(DdpModules, UntiedWeightsAndChangedBuffersAreRefused) {
  const auto run = [](Tied& net) { net->forward(batch_of(world().rank(), 1, {4, 3})).sum().backward(); };
  Tied untied, changed;
  expect_refused(
      untied, "parameter decoder was replaced by another tensor", [&] { untied->untie(); }, [&] { run(untied); });
  expect_refused(
      changed, "buffer scale was changed from Float[3]", [&] { changed->scale.set_data(torch::ones({4})); },
      [&] { run(changed); });
}

TEST(DdpModules, LocalBuffersMayChange) {
  Tied net;
  DistributedDataParallel ddp(net, world(), {.buffers = ddp::BufferMode::kLocal});
  for (int step = 0; step < 3; ++step) {
    net->scale.set_data(torch::full({3 + step * world().rank()}, 1.0 + world().rank()));
    join(ddp, [&] {
      for (int i = 0; i <= world().rank(); ++i) net->forward(batch_of(world().rank(), step, {4, 3})).sum().backward();
    });
  }
  EXPECT_EQ(net->scale.numel(), 3 + 2 * world().rank());
  EXPECT_EQ(net->scale[0].item<float>(), 1.0F + static_cast<float>(world().rank()));
}

TEST(DdpModules, ReplacedBufferIsSynchronised) {
  Mlp net;
  const at::Tensor first = torch::zeros({3});
  const at::Tensor second = torch::full({3}, 5.0 + world().rank());
  DistributedDataParallel ddp(
      ddp::ModelTensors{.parameters = ddp::named_parameters(*net), .buffers = {{"scale", first}}}, world());
  forward_backward(net, world().rank(), 1);
  ddp.replace_buffer(first, second);
  forward_backward(net, world().rank(), 2);
  EXPECT_TRUE(torch::equal(second, torch::full({3}, 5.0)));
}

TEST(DdpModules, FrozenParametersAreUnfrozenAndTheReverse) {
  Mlp net;
  net->first->weight.requires_grad_(false);
  net->first->bias.requires_grad_(false);
  DistributedDataParallel ddp(net, world());
  const auto expect = [&](int step, bool first, bool second) {
    for (at::Tensor& p : net->first->parameters()) p.requires_grad_(first);
    for (at::Tensor& p : net->second->parameters()) p.requires_grad_(second);
    auto expected = mean_over_ranks([&](int rank) { return local_gradients(net, rank, step); });
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!(i < 2 ? first : second)) expected[i] = at::Tensor();
    net->zero_grad();
    forward_backward(net, world().rank(), step);
    expect_gradients(*net, expected);
  };
  expect(0, false, true);
  expect(1, true, true);
  expect(2, true, false);  // only parameters that were frozen at first
  expect(3, false, true);
}

/// A filter in the frequency domain, with buffers of dtypes that no operation of a group accepts.
struct SpectralImpl : torch::nn::Module {
  SpectralImpl() {
    filter = register_parameter("filter", torch::randn({5, 3}, at::kComplexFloat));
    phase = register_parameter("phase", torch::randn({3}, at::kComplexDouble));
    gain = register_parameter("gain", torch::randn({3}));
    const at::Tensor numbers = torch::arange(6) + 10 * world().rank();
    register_buffer("rotary", torch::polar(torch::ones({6}), numbers.to(at::kFloat)));
    register_buffer("small", numbers.to(at::kShort));
    register_buffer("unsigned", numbers.to(at::kUInt16));
    register_buffer("quarter", numbers.to(at::kFloat8_e4m3fn));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::real(x.to(at::kComplexFloat).matmul(filter)) * gain + at::imag(phase).to(at::kFloat);
  }
  at::Tensor filter, phase, gain;
};
TORCH_MODULE(Spectral);

std::vector<at::Tensor> as_real(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors)
    if (tensor.is_complex()) tensor = at::view_as_real(tensor);
  return tensors;
}

TEST(DdpModules, ComplexParametersAndUnusualBuffers) {
  torch::manual_seed(1 + world().rank());
  Spectral net, alone;
  DistributedDataParallel ddp(net, world());
  for (const auto& buffer : net->buffers()) EXPECT_TRUE(same_bits(buffer));
  for (const auto& parameter : as_real(net->parameters())) EXPECT_TRUE(same_bits(parameter.detach()));
  EXPECT_EQ(net->named_buffers()["small"][5].item<int>(), 5);  // rank 0's
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const at::NoGradGuard no_grad;
    const auto expected = mean_over_ranks([&](int rank) {
      const at::AutoGradMode grad(true);
      copy_values(*net, *alone);
      alone->zero_grad();
      alone->forward(batch_of(rank, step, {4, 5})).pow(2).sum().backward();
      return as_real(gradients(*alone));
    });
    optimizer.zero_grad();
    {
      const at::AutoGradMode grad(true);
      net->forward(batch_of(world().rank(), step, {4, 5})).pow(2).sum().backward();
    }
    const auto got = as_real(gradients(*net));
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(torch::allclose(got[i].to(at::kDouble), expected[i].to(at::kDouble), 1e-4, 1e-5)) << step << " " << i;
      EXPECT_TRUE(same_bits(got[i]));
    }
    optimizer.step();
  }
  EXPECT_TRUE(same_bits(at::view_as_real(net->filter.detach())));
}

TEST(DdpModules, ComplexParametersAreRefusedByOurOptimizers) {
  Spectral net;
  DistributedDataParallel ddp(net, world());
  expect_usage_error("filter", [&] { optim::Adam optimizer(ddp, {}); });
}

TEST(DdpModules, GradientsOfOtherDtypesAreRefused) {
  Mlp net;
  net->register_parameter("eighth", torch::ones({3}).to(at::kFloat8_e4m3fn), /*requires_grad=*/true);
  expect_usage_error("parameter eighth requires a gradient and is Float8_e4m3fn",
                     [&] { DistributedDataParallel ddp(net, world()); });
  net->named_parameters()["eighth"].requires_grad_(false);
  DistributedDataParallel ddp(net, world());
  forward_backward(net, world().rank(), 1);
}

TEST(DdpModules, EndWithoutAnExchangeIsAWarning) {
  const auto stderr_of = [](const std::function<void()>& call) {
    ::testing::internal::CaptureStderr();
    call();
    return ::testing::internal::GetCapturedStderr();
  };
  const bool warns = world().size() > 1 && world().rank() == 0;
  Mlp net;
  const std::string silent = stderr_of([&] { const DistributedDataParallel ddp(net, world()); });
  EXPECT_EQ(silent.find("have never exchanged gradients") != std::string::npos, warns) << silent;
  const std::string trained = stderr_of([&] {
    const DistributedDataParallel ddp(net, world());
    forward_backward(net, world().rank(), 1);
  });
  EXPECT_EQ(trained.find("exchanged"), std::string::npos) << trained;
  const std::string moved = stderr_of([&] {
    auto ddp = std::make_unique<DistributedDataParallel>(net, world());
    const DistributedDataParallel other(std::move(*ddp));
    ddp.reset();
    forward_backward(net, world().rank(), 1);
  });
  EXPECT_EQ(moved.find("exchanged"), std::string::npos) << moved;
}

TEST(DdpModules, ReplicasThatDifferAtTheEndAreAWarning) {
  const int last = world().size() - 1;
  for (const bool differs : {false, true}) {
    Mlp net;
    ::testing::internal::CaptureStderr();
    {
      const DistributedDataParallel ddp(net, world(), {.compare_replicas_every = 0});
      forward_backward(net, world().rank(), 1);
      const torch::NoGradGuard no_grad;
      if (differs && world().rank() == last) net->second->bias.add_(1e-3);
    }
    std::string all;  // the rank that ends last prints
    for (const std::string& text : world().all_gather_bytes(::testing::internal::GetCapturedStderr())) all += text;
    const std::size_t first =
        all.find("REPLICA_DIVERGED when the DistributedDataParallel ended, parameter second.bias");
    EXPECT_EQ(first != std::string::npos, differs && world().size() > 1) << all;
    EXPECT_EQ(all.find("REPLICA_DIVERGED", first + 1), std::string::npos) << all;
  }
}

struct OneParameter : torch::nn::Module {
  explicit OneParameter(const at::Tensor& value) : parameter(register_parameter("parameter", value)) {}
  at::Tensor parameter;
};

// Rank 0's value of a large parameter is received in the parameter's own memory if that is contiguous.
TEST(DdpModules, LargeParametersAreBroadcastWithoutACopy) {
  const auto before = comm::arena::arena_stats();
  std::int64_t rows = 0;  // more bytes than any rank has used at once
  for (const std::string& peak : world().all_gather_bytes(std::to_string(before.peak_live_bytes)))
    rows = std::max<std::int64_t>(rows, (std::stoll(peak) + (std::int64_t{34} << 20)) / 4096);
  for (const bool transposed : {false, true}) {
    const at::Tensor value = torch::full({rows, 1024}, world().rank() + 1.0, world().device());
    OneParameter net(transposed ? value.t() : value);
    const std::int64_t version = net.parameter._version();
    const DistributedDataParallel ddp(net, world());
    EXPECT_TRUE(net.parameter.detach().eq(1).all().item<bool>());
    EXPECT_EQ(net.parameter._version() > version, world().size() > 1);
    EXPECT_EQ(net.parameter.is_contiguous(), !transposed);
    const auto now = comm::arena::arena_stats();
    if (!transposed && now.live_bytes > value.nbytes()) {
      EXPECT_LT(now.peak_live_bytes, before.live_bytes + value.nbytes() + (std::uint64_t{16} << 20));
    }
  }
}

TEST(DdpModules, ReplicasAreComparedOnRequest) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  ddp.compare_replicas();
  forward_backward(net, world().rank(), 1);
  ddp.compare_replicas();
}

}  // namespace
}  // namespace lockstep::tests::ddp_modules_test
