// Calls every function that takes a module with a holder, a shared_ptr, a pointer and a module that no shared_ptr owns.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/amp/finite_checker.h"
#include "lockstep/amp/precision.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/nn/data_parallel.h"
#include "lockstep/nn/module_summary.h"
#include "lockstep/nn/sync_batch_norm.h"
#include "lockstep/optim/ema.h"
#include "lockstep/train/trainer.h"
#include "tests/support/temp_dir.h"

namespace lockstep {
namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(2, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(layer(x)); }
  at::Tensor training_step(at::Tensor& batch, training::StepLog&) { return forward(batch).sum(); }
  void validation_step(at::Tensor&, training::StepLog&) {}
  std::vector<training::OptimizerConfig> configure_optimizers(training::TrainingSetup&) { return {}; }
  torch::nn::Linear layer{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

template <typename Call>
void with_each_form(const Call& call) {
  Net holder;
  call(holder);
  call(std::make_shared<NetImpl>());
  call(Net().ptr());
  NetImpl plain;
  call(plain);
  call(&plain);
  torch::nn::Module& base = plain;
  if constexpr (requires { call(base); }) call(base);
}

TEST(ModuleArguments, AllFormsAreAccepted) {
  const tests::TempDir folder;
  comm::Group world = comm::init();
  with_each_form([&](auto&& net) {
    checkpoint::save(net, folder / "x");
    EXPECT_TRUE(checkpoint::load(net, folder / "x").missing.empty());
    EXPECT_NE(nn::module_summary(net).find("layer"), std::string::npos);
    amp::cast(net, amp::parse_precision("32"));
    amp::FiniteChecker(net).check(torch::ones({1}));
    optim::Ema ema(net, {.decay = 0.5});
    ema.update();
    ddp::broadcast_parameters(net, world);
    EXPECT_FALSE(nn::has_sync_batch_norm(net));
    EXPECT_EQ(ddp::DistributedDataParallel(net, world, {.overlap = false}).group().size(), 1);
    torch::optim::SGD optimizer(nn::ModuleRef(net)->parameters(), 0.1);
    checkpoint::load_optimizer_state_dict(optimizer, net, checkpoint::optimizer_state_dict(optimizer, net));
    training::TrainingSetup setup(world, *nn::ModuleRef(net), {}, 1, 1);
    EXPECT_EQ(&setup.ddp(net), &setup.ddp());
  });
  with_each_form([&](auto&& net) { EXPECT_EQ(nn::convert_sync_batch_norm(net, world), 1); });
}

TEST(ModuleArguments, DataParallelAcceptsAllForms) {
  with_each_form([&](auto&& net)
                   requires requires { nn::module_of(net).layer; }
                 {
                   nn::DataParallel parallel(net, {.devices = {at::kCPU, at::kCPU}});
                   EXPECT_EQ(parallel(torch::ones({4, 2})).size(0), 4);
                   nn::module_of(net).eval();
                   EXPECT_EQ(parallel(torch::ones({4, 2})).size(0), 4);
                 });
}

template <typename T>
concept CanBeFitted = requires(training::Trainer& trainer, T&& net, data::Loader<at::Tensor>& loader) {
  trainer.fit(std::forward<T>(net), loader);
  trainer.fit(std::forward<T>(net), loader, loader);
  trainer.validate(std::forward<T>(net), loader);
};
static_assert(CanBeFitted<Net&> && CanBeFitted<Net> && CanBeFitted<std::shared_ptr<NetImpl>&> &&
              CanBeFitted<std::shared_ptr<NetImpl>> && CanBeFitted<NetImpl&> && CanBeFitted<NetImpl*>);
static_assert(!CanBeFitted<torch::nn::Linear&>, "has no training_step()");

template <typename T>
concept IsModuleRef = std::convertible_to<T, nn::ModuleRef>;
static_assert(!IsModuleRef<NetImpl> && !IsModuleRef<const NetImpl&> && !IsModuleRef<const Net&> && !IsModuleRef<int>);
static_assert(std::convertible_to<const NetImpl&, nn::ConstModuleRef> &&
              std::convertible_to<const Net&, nn::ConstModuleRef> &&
              std::convertible_to<nn::ModuleRef, nn::ConstModuleRef>);

TEST(ModuleArguments, HandleWithoutModuleIsAnError) {
  Net empty(nullptr);
  EXPECT_THROW(nn::module_summary(empty), base::UsageError);
  EXPECT_THROW(amp::cast(std::shared_ptr<NetImpl>(), {}), base::UsageError);
  NetImpl* const none = nullptr;
  EXPECT_THROW(optim::Ema{none}, base::UsageError);
}

}  // namespace
}  // namespace lockstep
