// Tests loss scaling across ranks: an infinity on one rank skips the step on all ranks, and otherwise the results equal
// those without scaling.
#include <gmock/gmock.h>

#include <limits>
#include <optional>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/lars.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/optim/optim_reference.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::amp_test {
namespace {

using amp::GradScaler;
using ddp::DistributedDataParallel;

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
struct OptimizerVariant {
  const char* name;
  std::function<Optimizer(DistributedDataParallel&, const std::vector<at::Tensor>&)> make;
};
template <typename Fused, typename Options>
OptimizerVariant foreach (const char* name, const Options& options) {
  return {name, [options](auto& ddp, auto&) {
            return std::make_unique<Fused>(ddp, options, std::vector<typename Fused::Group>(),
                                           optim::FusedOptions{.foreach = true});
          }};
}

const OptimizerVariant kVariants[] = {
    {"torch SGD",
     [](auto&, auto& all) {
       return std::make_unique<torch::optim::SGD>(all, torch::optim::SGDOptions(0.02).momentum(0.9));
     }},
    {"torch AdamW",
     [](auto&, auto& all) { return std::make_unique<torch::optim::AdamW>(all, torch::optim::AdamWOptions(0.01)); }},
    {"fused SGD",
     [](auto& ddp, auto&) {
       return std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.02, .momentum = 0.9});
     }},
    {"fused AdamW",
     [](auto& ddp, auto&) { return std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 0.01}); }},
    foreach<optim::SGD>("SGD by operations", optim::SGDOptions{.lr = 0.02, .momentum = 0.9}),
    foreach<optim::AdamW>("AdamW by operations", optim::AdamWOptions{.lr = 0.01}),
    {"fused LAMB", [](auto& ddp, auto&) { return std::make_unique<optim::LAMB>(ddp, optim::LAMBOptions{.lr = 0.01}); }},
};

/// One variant for each way in which optimizers treat averaged gradients.
const OptimizerVariant kVariantsWithAveraging[] = {kVariants[0], kVariants[3], kVariants[5], kVariants[6]};

/// What a step does between backward() and step().
struct StepPlan {
  int backwards = 1;
  bool no_sync = false;
  bool clip_norm = false;
  bool clip_gradients_by_value = false;  // modifies the gradients
  bool clip_by_optimizer = false;        // by the optimizer if it is a fused one
  bool average_before_unscale = false;
  at::ScalarType wire_dtype = at::kFloat;
};

constexpr int kSteps = 9;
bool is_bad(int step) { return step == 2 || step == 3 || step == 7; }

/// Returns a loss, which is infinite on the last rank if `bad`.
at::Tensor loss_of(Mlp& net, int step, int part, bool bad) {
  const at::Tensor loss = net->forward(batch_of(world().rank(), 100 * step + part, {4, 7})).pow(2).sum();
  return bad && part == 0 && world().rank() == world().size() - 1 ? loss * std::numeric_limits<float>::infinity()
                                                                  : loss;
}

void process_gradients(const StepPlan& plan, torch::optim::Optimizer& optimizer, Mlp& net, std::vector<double>& norms) {
  auto* fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer);
  if (plan.clip_gradients_by_value) {
    if (fused && !plan.average_before_unscale) fused->average_gradients();
    torch::nn::utils::clip_grad_value_(net->parameters(), 0.05);
  }
  if (plan.clip_norm)
    norms.push_back(fused ? optim::clip_grad_norm(optimizer, 0.5).item<double>()
                          : torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5));
  if (plan.clip_by_optimizer && fused) optim::clip_grad_value(optimizer, 0.02);
  if (plan.clip_by_optimizer && !fused) torch::nn::utils::clip_grad_value_(net->parameters(), 0.02);
}

struct TrainResult {
  std::vector<at::Tensor> parameters;
  std::vector<double> norms;
  std::vector<bool> made;
};

/// Trains kSteps steps with `scaler`. Without a scaler, omits the bad steps.
TrainResult train(const OptimizerVariant& variant, const StepPlan& plan, GradScaler* scaler) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.wire_dtype = plan.wire_dtype});
  const Optimizer optimizer = variant.make(ddp, net->parameters());
  TrainResult result;
  for (int step = 0; step < kSteps; ++step) {
    if (is_bad(step) && !scaler) continue;
    optimizer->zero_grad();
    for (int part = 0; part < plan.backwards; ++part) {
      std::optional<DistributedDataParallel::NoSync> no_sync_guard;
      if (plan.no_sync && part + 1 < plan.backwards) no_sync_guard.emplace(ddp);
      const at::Tensor loss = loss_of(net, step, part, is_bad(step));
      (scaler ? scaler->scale(loss) : loss).backward();
    }
    auto* fused = dynamic_cast<optim::FusedOptimizer*>(optimizer.get());
    if (plan.average_before_unscale && fused) fused->average_gradients();
    if (scaler && (plan.clip_norm || plan.clip_gradients_by_value || plan.clip_by_optimizer))
      scaler->unscale_(*optimizer);
    process_gradients(plan, *optimizer, net, result.norms);
    if (is_bad(step) && !result.norms.empty()) result.norms.pop_back();
    if (scaler) {
      result.made.push_back(scaler->step(*optimizer));
      scaler->update();
    } else {
      optimizer->step();
    }
  }
  for (const at::Tensor& parameter : net->parameters()) result.parameters.push_back(parameter.detach().clone());
  return result;
}

void expect_same(const OptimizerVariant& variant, const StepPlan& plan) {
  SCOPED_TRACE(variant.name);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
  const TrainResult scaled = train(variant, plan, &scaler);
  const TrainResult plain = train(variant, plan, nullptr);
  for (int step = 0; step < kSteps; ++step)
    EXPECT_EQ(scaled.made[static_cast<std::size_t>(step)], !is_bad(step)) << step;
  EXPECT_EQ(scaler.get_scale(), 1024 / 2 / 2 * 2 / 2);
  EXPECT_EQ(scaled.norms, plain.norms);
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(scaled.parameters[i], plain.parameters[i])) << i;
    EXPECT_TRUE(same_bits(scaled.parameters[i])) << i;
  }
}

TEST(Amp, InfinityOnOneRankSkipsStepOnAllRanks) {
  for (const OptimizerVariant& variant : kVariants) expect_same(variant, {});
  expect_same(foreach<optim::Adagrad>("Adagrad by operations", optim::AdagradOptions{.lr = 0.05, .lr_decay = 0.2}), {});
  expect_same(foreach<optim::LAMB>("LAMB by operations", optim::LAMBOptions{.lr = 0.01, .weight_decay = 0.1}), {});
  expect_same(foreach<optim::LARS>("LARS by operations", optim::LARSOptions{.lr = 0.1, .momentum = 0.9}), {});
}

/// Updates that a device skips are not counted, neither in state_dict() nor in torch's archive.
TEST(Amp, SkippedUpdatesAreNotCounted) {
  torch::manual_seed(1);
  Mlp net;
  ddp::DistributedDataParallel ddp(net, world());
  optim::AdamW optimizer(ddp, {.lr = 0.01}, {}, {.foreach = true});
  GradScaler scaler({.init_scale = 1024});
  int made = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    scaler.scale(loss_of(net, step, 0, is_bad(step))).backward();
    made += scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(made, kSteps - 3);
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);  // before state_dict(): save() corrects the counts itself
  for (const auto& [key, state] : optimizer.state())
    EXPECT_EQ(static_cast<const torch::optim::AdamWParamState&>(*state).step(), made);
  int counts = 0;
  for (const auto& [name, value] : optimizer.state_dict())
    if (name.ends_with(".step")) {
      ++counts;
      EXPECT_EQ(std::get<at::Tensor>(value).item<int>(), made) << name;
    }
  EXPECT_EQ(counts, static_cast<int>(net->parameters().size()));
}

TEST(Amp, ClipNormUsesUnscaledGradients) {
  for (const OptimizerVariant& variant : kVariants) expect_same(variant, {.clip_norm = true});
}

TEST(Amp, ClipValueUsesUnscaledGradients) {
  for (const OptimizerVariant& variant : kVariantsWithAveraging) {
    expect_same(variant, {.clip_by_optimizer = true});
    expect_same(variant, {.clip_norm = true, .clip_by_optimizer = true});
  }
}

TEST(Amp, SeveralBackwardsAccumulate) {
  for (const OptimizerVariant& variant : kVariantsWithAveraging) {
    expect_same(variant, {.backwards = 3});
    expect_same(variant, {.backwards = 3, .no_sync = true, .clip_norm = true});
  }
}

TEST(Amp, AveragedGradientsMayBeModified) {
  for (const OptimizerVariant& variant : kVariantsWithAveraging)
    for (const bool first : {false, true}) {
      expect_same(variant, {.clip_gradients_by_value = true, .average_before_unscale = first});
      expect_same(
          variant,
          {.backwards = 2, .clip_norm = true, .clip_gradients_by_value = true, .average_before_unscale = first});
    }
}

TEST(Amp, WorksWithBfloat16WireDtype) {
  if (world().transport() != "hierarchy") return;
  for (const OptimizerVariant& variant : kVariantsWithAveraging)
    expect_same(variant, {.clip_norm = true, .wire_dtype = at::kBFloat16});
}

TEST(Amp, OneScalerForTwoModels) {
  torch::manual_seed(1);
  Mlp nets[2], plain[2];
  for (int k = 0; k < 2; ++k) copy_values(*nets[k], *plain[k]);
  DistributedDataParallel ddp[2] = {{nets[0], world()}, {nets[1], world()}};
  optim::SGD first(ddp[0], {.lr = 0.02});
  torch::optim::AdamW second(nets[1]->parameters(), 0.01);
  GradScaler scaler({.init_scale = 64});
  const auto bad = [](int k, int step) { return k == 0 ? step == 1 : step == 3; };
  for (int step = 0; step < 6; ++step) {
    first.zero_grad();
    second.zero_grad();
    const auto losses =
        scaler.scale({loss_of(nets[0], step, 0, bad(0, step)), loss_of(nets[1], step, 0, bad(1, step))});
    losses[0].backward();
    losses[1].backward();
    EXPECT_EQ(scaler.step(first), !bad(0, step)) << step;
    EXPECT_EQ(scaler.step(second), !bad(1, step)) << step;
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 16);
  DistributedDataParallel plain_ddp[2] = {{plain[0], world()}, {plain[1], world()}};
  optim::SGD plain_first(plain_ddp[0], {.lr = 0.02});
  torch::optim::AdamW plain_second(plain[1]->parameters(), 0.01);
  torch::optim::Optimizer* optimizers[] = {&plain_first, &plain_second};
  for (int k = 0; k < 2; ++k)
    for (int step = 0; step < 6; ++step) {
      if (bad(k, step)) continue;
      optimizers[k]->zero_grad();
      loss_of(plain[k], step, 0, false).backward();
      optimizers[k]->step();
    }
  for (int k = 0; k < 2; ++k)
    for (std::size_t i = 0; i < 4; ++i)
      EXPECT_TRUE(torch::equal(nets[k]->parameters()[i], plain[k]->parameters()[i])) << k << " " << i;
}

TEST(Amp, RanksAgreeThroughGroupWithoutDdp) {
  Mlp net;
  torch::optim::SGD optimizer(net->parameters(), 0.02);
  GradScaler scaler({.init_scale = 64, .group = world()});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor before = net->first->weight.detach().clone();
    const at::Tensor loss = scaler.scale(loss_of(net, step, 0, is_bad(step)));
    const bool idle = world().size() > 1 && world().rank() == 0;  // has no gradients, but makes the same calls
    if (!idle) loss.backward();
    EXPECT_EQ(scaler.step(optimizer), !is_bad(step)) << step;
    scaler.update();
    EXPECT_EQ(torch::equal(before, net->first->weight), is_bad(step) || idle) << step;
  }
  EXPECT_EQ(scaler.get_scale(), 8);
  optimizer.zero_grad();
  EXPECT_THROW(scaler.step(optimizer), base::UsageError);  // no rank has a gradient
}

TEST(Amp, RanksAgreeThroughGroupWithHostSyncEvery) {
  for (const OptimizerVariant& variant : kVariants) {
    SCOPED_TRACE(variant.name);
    torch::manual_seed(1);
    Mlp net;
    DistributedDataParallel ddp(net, world(), {.average_hosts_every = 2});
    const Optimizer optimizer = variant.make(ddp, net->parameters());
    GradScaler scaler({.init_scale = 64, .group = world()});
    for (int step = 0; step < kSteps; ++step) {
      optimizer->zero_grad();
      scaler.scale(loss_of(net, step, 0, is_bad(step))).backward();
      EXPECT_EQ(scaler.step(*optimizer), !is_bad(step)) << step;
      scaler.update();
    }
    world().barrier();
    ddp.average_hosts();
    EXPECT_EQ(scaler.get_scale(), 8);
    EXPECT_TRUE(same_bits(net->first->weight.detach()));
    EXPECT_TRUE(net->first->weight.isfinite().all().item<bool>());
  }
}

TEST(Amp, SkippedStepEndsGroupStep) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.02});
  if (!optimizer.shares_parameters() || !on_shm()) return;
  GradScaler scaler;
  scaler.scale(loss_of(net, 0, 0, true)).backward();
  const std::int64_t before = world().steps();
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_EQ(world().steps(), before + 1);
}

template <typename Action>
void expect_usage_error(const std::string& text, Action action) {
  EXPECT_THAT(tests::message_of<base::UsageError>(action), ::testing::HasSubstr(text));
}

TEST(Amp, UnsupportedUseOfFusedOptimizersIsRejected) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.02});
  GradScaler scaler({.init_scale = 64});
  const auto backward = [&](int part) { scaler.scale(loss_of(net, 0, part, false)).backward(); };
  if (on_shm()) {
    expect_usage_error("no parameter of this optimizer has a gradient", [&] {
      scaler.scale(torch::ones({}));
      scaler.step(optimizer);
    });
    backward(0);
    scaler.unscale_(optimizer);
    backward(1);
    expect_usage_error("backward() was called after GradScaler::unscale_()", [&] { scaler.step(optimizer); });
    scaler.update();
    optimizer.zero_grad();
  }
  backward(0);
  optim::clip_grad_norm(optimizer, 1e-3);
  expect_usage_error("has been called before", [&] { scaler.step(optimizer); });
  optimizer.zero_grad();
  backward(0);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  optimizer.zero_grad();
  optimizer.update_in_backward();
  backward(0);
  expect_usage_error("update_in_backward()", [&] { scaler.unscale_(optimizer); });
  optimizer.step();
}

TEST(Amp, JoinedRanksShadowOthers) {
  if (world().transport() == "hierarchy") return;  // not supported with a fused optimizer
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW optimizer(ddp, {.lr = 0.01});
  GradScaler scaler({.init_scale = 64});
  ddp::join(ddp, [&] {
    for (int step = 0; step < 3 + world().rank(); ++step) {
      optimizer.zero_grad();
      scaler.scale(loss_of(net, step, 0, is_bad(step))).backward();
      scaler.unscale_(optimizer);
      optim::clip_grad_norm(optimizer, 1);
      EXPECT_EQ(scaler.step(optimizer), !is_bad(step)) << step;
      scaler.update();
    }
  });
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
    EXPECT_TRUE(item.value().isfinite().all().item<bool>());
  }
}

TEST(Amp, AutocastTrainsInBfloat16) {
  for (const OptimizerVariant& variant : kVariants) {
    torch::manual_seed(1);
    Mlp net;
    DistributedDataParallel ddp(net, world());
    const Optimizer optimizer = variant.make(ddp, net->parameters());
    std::vector<double> losses;
    for (int step = 0; step < 30; ++step) {
      optimizer->zero_grad();
      at::Tensor loss;
      {
        const amp::Autocast guard;
        const at::Tensor out = net->forward(batch_of(world().rank(), 0, {4, 7}));
        EXPECT_EQ(out.scalar_type(), at::kBFloat16);
        loss = torch::mse_loss(out, torch::ones({4, 5}));
      }
      loss.backward();
      EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
      optimizer->step();
      losses.push_back(loss.item<double>());
    }
    EXPECT_LT(losses.back(), 0.8 * losses.front()) << variant.name;
    EXPECT_TRUE(same_bits(net->first->weight.detach())) << variant.name;
  }
}

}  // namespace
}  // namespace lockstep::tests::amp_test
