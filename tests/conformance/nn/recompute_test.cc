// Tests recompute() in a DistributedDataParallel: gradients have the bits of a model that recomputes nothing.
#include "lockstep/nn/recompute.h"

#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::recompute_test {
namespace {

using ddp::DistributedDataParallel;

/// Two heads after two blocks with dropout; a forward uses one head, and may recompute the blocks and the head.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::Dropout(0.2), torch::nn::Tanh()));
      heads->push_back(torch::nn::Sequential(torch::nn::Linear(6, 2)));
    }
    register_module("blocks", blocks);
    register_module("heads", heads);
  }
  at::Tensor forward(at::Tensor x, int head, bool recomputes) {
    const auto call = [&](const std::shared_ptr<torch::nn::Module>& module, const at::Tensor& in) {
      auto& part = *module->as<torch::nn::SequentialImpl>();
      return recomputes ? nn::recompute(part, in) : part.forward(in);
    };
    for (const auto& block : *blocks) x = call(block, x);
    // The parameters of the other head are inputs of the node in the graph, and get no gradient.
    const auto use_head = [head](torch::nn::ModuleListImpl& all, const at::Tensor& in) {
      return all[static_cast<std::size_t>(head)]->as<torch::nn::SequentialImpl>()->forward(in);
    };
    return recomputes ? nn::recompute(heads, use_head, x) : use_head(*heads, x);
  }
  torch::nn::ModuleList blocks, heads;
};
TORCH_MODULE(Net);

TEST(Recompute, GradientsHaveTheSameBits) {
  Net with, without;
  copy_values(*with, *without);
  DistributedDataParallel first(with, world(), {.bucket_bytes = {64}});
  DistributedDataParallel second(without, world(), {.bucket_bytes = {64}});
  copy_values(*with, *without);
  std::vector<torch::optim::SGD> optimizers;
  for (Net* net : {&with, &without}) optimizers.emplace_back((*net)->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    const int head = (step + world().rank()) % 2;  // ranks use different heads
    for (Net* net : {&with, &without}) {
      torch::manual_seed(100 * step + world().rank());
      auto& optimizer = optimizers[net == &with ? 0 : 1];
      optimizer.zero_grad();
      for (int part = 0; part < 2; ++part) {  // accumulates
        std::optional<DistributedDataParallel::NoSync> no_sync;
        if (part == 0) no_sync.emplace(net == &with ? first : second);
        (*net)->forward(batch_of(world().rank(), 2 * step + part, {4, 6}), head, net == &with).pow(2).sum().backward();
      }
      optimizer.step();
    }
    const auto a = with->parameters(), b = without->parameters();
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(torch::equal(a[i], b[i])) << step << " " << i;
      EXPECT_TRUE(same_bits(a[i].detach()));
    }
  }
}

}  // namespace
}  // namespace lockstep::tests::recompute_test
