// Loss scaling between ranks: an infinity on one skips the step on all, and nothing else differs from a training
// without scaling.
#include <limits>
#include <optional>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/lars.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/optim/optim_reference.h"

namespace lockstep::tests {
namespace {

using amp::GradScaler;
using ddp::DistributedDataParallel;

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
struct Way {
  const char* name;
  std::function<Optimizer(DistributedDataParallel&, const std::vector<at::Tensor>&)> make;
};
template <typename Fused, typename Options>
Way by_operations(const char* name, const Options& options) {
  return {name, [options](auto& ddp, auto&) {
            return std::make_unique<Fused>(ddp, options, std::vector<typename Fused::Group>(),
                                           optim::FusedOptions{.by_operations = true});
          }};
}

const Way kWays[] = {
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
    by_operations<optim::SGD>("SGD by operations", optim::SGDOptions{.lr = 0.02, .momentum = 0.9}),
    by_operations<optim::AdamW>("AdamW by operations", optim::AdamWOptions{.lr = 0.01}),
    {"fused LAMB", [](auto& ddp, auto&) { return std::make_unique<optim::LAMB>(ddp, optim::LAMBOptions{.lr = 0.01}); }},
};

/// Those between which what follows makes a difference.
const Way kWaysToAverage[] = {kWays[0], kWays[3], kWays[5], kWays[6]};

/// What happens between backward() and step().
struct Plan {
  int backwards = 1;  // in a step
  bool no_sync = false;
  bool clip_norm = false;
  bool clip_values = false;  // in the gradients
  bool cut_values = false;   // by the optimizer, where it is a fused one
  bool average_first = false;
  at::ScalarType wire = at::kFloat;
};

constexpr int kSteps = 9;
bool is_bad(int step) { return step == 2 || step == 3 || step == 7; }

/// A loss of which one rank's is infinite in bad steps.
at::Tensor loss_of(Mlp& net, int step, int part, bool bad) {
  const at::Tensor loss = net->forward(batch_of(world().rank(), 100 * step + part, {4, 7})).pow(2).sum();
  return bad && part == 0 && world().rank() == world().size() - 1 ? loss * std::numeric_limits<float>::infinity()
                                                                  : loss;
}

void between(const Plan& plan, torch::optim::Optimizer& optimizer, Mlp& net, std::vector<double>& norms) {
  auto* fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer);
  if (plan.clip_values) {
    if (fused && !plan.average_first) fused->average_gradients();
    torch::nn::utils::clip_grad_value_(net->parameters(), 0.05);
  }
  if (plan.clip_norm)
    norms.push_back(fused ? fused->clip_grad_norm(0.5).item<double>()
                          : torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5));
  if (plan.cut_values && fused) fused->clip_grad_value(0.02);
  if (plan.cut_values && !fused) torch::nn::utils::clip_grad_value_(net->parameters(), 0.02);
}

struct Trained {
  std::vector<at::Tensor> parameters;
  std::vector<double> norms;
  std::vector<bool> made;
};

/// With `scaler`: of kSteps steps, some of them bad; without: of the good ones.
Trained train(const Way& way, const Plan& plan, GradScaler* scaler) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.wire = plan.wire});
  const Optimizer optimizer = way.make(ddp, net->parameters());
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    if (is_bad(step) && !scaler) continue;
    optimizer->zero_grad();
    for (int part = 0; part < plan.backwards; ++part) {
      std::optional<DistributedDataParallel::NoSync> quiet;
      if (plan.no_sync && part + 1 < plan.backwards) quiet.emplace(ddp);
      const at::Tensor loss = loss_of(net, step, part, is_bad(step));
      (scaler ? scaler->scale(loss) : loss).backward();
    }
    auto* fused = dynamic_cast<optim::FusedOptimizer*>(optimizer.get());
    if (plan.average_first && fused) fused->average_gradients();
    if (scaler && (plan.clip_norm || plan.clip_values || plan.cut_values)) scaler->unscale_(*optimizer);
    between(plan, *optimizer, net, trained.norms);
    if (is_bad(step) && !trained.norms.empty()) trained.norms.pop_back();
    if (scaler) {
      trained.made.push_back(scaler->step(*optimizer));
      scaler->update();
    } else {
      optimizer->step();
    }
  }
  for (const at::Tensor& parameter : net->parameters()) trained.parameters.push_back(parameter.detach().clone());
  return trained;
}

void expect_same(const Way& way, const Plan& plan) {
  SCOPED_TRACE(way.name);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
  const Trained scaled = train(way, plan, &scaler);
  const Trained plain = train(way, plan, nullptr);
  for (int step = 0; step < kSteps; ++step)
    EXPECT_EQ(scaled.made[static_cast<std::size_t>(step)], !is_bad(step)) << step;
  EXPECT_EQ(scaler.get_scale(), 1024 / 2 / 2 * 2 / 2);
  EXPECT_EQ(scaled.norms, plain.norms);
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(scaled.parameters[i], plain.parameters[i])) << i;
    EXPECT_TRUE(same_bits(scaled.parameters[i])) << i;
  }
}

TEST(Amp, AnInfinityOnOneRankSkipsTheStepOnAll) {
  for (const Way& way : kWays) expect_same(way, {});
  expect_same(
      by_operations<optim::Adagrad>("Adagrad by operations", optim::AdagradOptions{.lr = 0.05, .lr_decay = 0.2}), {});
  expect_same(by_operations<optim::LAMB>("LAMB by operations", optim::LAMBOptions{.lr = 0.01, .weight_decay = 0.1}),
              {});
  expect_same(by_operations<optim::LARS>("LARS by operations", optim::LARSOptions{.lr = 0.1, .momentum = 0.9}), {});
}

/// What a device would skip without telling anybody is not counted, in state_dict() and in torch's archive.
TEST(Amp, SkippedUpdatesAreNotCounted) {
  torch::manual_seed(1);
  Mlp net;
  ddp::DistributedDataParallel ddp(net, world());
  optim::AdamW optimizer(ddp, {.lr = 0.01}, {}, {.by_operations = true});
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
  optimizer.save(archive);  // before state_dict(): it settles by itself
  for (const auto& [key, state] : optimizer.state())
    EXPECT_EQ(static_cast<const torch::optim::AdamWParamState&>(*state).step(), made);
  int counts = 0;
  for (const auto& [name, tensor] : optimizer.state_dict())
    if (name.ends_with(".step")) {
      ++counts;
      EXPECT_EQ(tensor.item<int>(), made) << name;
    }
  EXPECT_EQ(counts, static_cast<int>(net->parameters().size()));
}

TEST(Amp, NormsAreThoseOfUnscaledGradients) {
  for (const Way& way : kWays) expect_same(way, {.clip_norm = true});
}

TEST(Amp, ValuesAreCutAfterUnscaling) {
  for (const Way& way : kWaysToAverage) {
    expect_same(way, {.cut_values = true});
    expect_same(way, {.clip_norm = true, .cut_values = true});
  }
}

TEST(Amp, SeveralBackwardsAddUp) {
  for (const Way& way : kWaysToAverage) {
    expect_same(way, {.backwards = 3});
    expect_same(way, {.backwards = 3, .no_sync = true, .clip_norm = true});
  }
}

TEST(Amp, GradientsMayBeChangedOnceTheyAreMeans) {
  for (const Way& way : kWaysToAverage)
    for (const bool first : {false, true}) {
      expect_same(way, {.clip_values = true, .average_first = first});
      expect_same(way, {.backwards = 2, .clip_norm = true, .clip_values = true, .average_first = first});
    }
}

TEST(Amp, BetweenHostsGradientsMayBeRounded) {
  if (world().transport() != "hierarchy") return;
  for (const Way& way : kWaysToAverage) expect_same(way, {.clip_norm = true, .wire = at::kBFloat16});
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

TEST(Amp, WithoutDdpAGroupAgrees) {
  Mlp net;
  torch::optim::SGD optimizer(net->parameters(), 0.02);
  GradScaler scaler({.init_scale = 64, .group = world()});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor before = net->first->weight.detach().clone();
    const at::Tensor loss = scaler.scale(loss_of(net, step, 0, is_bad(step)));
    const bool idle = world().size() > 1 && world().rank() == 0;  // it has no gradient, and keeps company
    if (!idle) loss.backward();
    EXPECT_EQ(scaler.step(optimizer), !is_bad(step)) << step;
    scaler.update();
    EXPECT_EQ(torch::equal(before, net->first->weight), is_bad(step) || idle) << step;
  }
  EXPECT_EQ(scaler.get_scale(), 8);
  optimizer.zero_grad();
  EXPECT_THROW(scaler.step(optimizer), base::UsageError);  // no rank has one
}

TEST(Amp, HostsThatMeetNowAndThenAgreeByTheGroup) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    torch::manual_seed(1);
    Mlp net;
    DistributedDataParallel ddp(net, world(), {.host_sync_every = 2});
    const Optimizer optimizer = way.make(ddp, net->parameters());
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

TEST(Amp, ASkippedStepEndsTheStepOfTheGroup) {
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
void expect_refusal(const std::string& text, Action action) {
  try {
    action();
    ADD_FAILURE() << "nothing refused: " << text;
  } catch (const base::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Amp, WhatFusedOptimizersCannotDoIsRefused) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.02});
  GradScaler scaler({.init_scale = 64});
  const auto backward = [&](int part) { scaler.scale(loss_of(net, 0, part, false)).backward(); };
  if (on_shm()) {
    expect_refusal("no parameter of this optimizer has a gradient", [&] {
      scaler.scale(torch::ones({}));
      scaler.step(optimizer);
    });
    backward(0);
    scaler.unscale_(optimizer);
    backward(1);
    expect_refusal("backward() came after GradScaler::unscale_()", [&] { scaler.step(optimizer); });
    scaler.update();
    optimizer.zero_grad();
  }
  backward(0);
  optimizer.clip_grad_norm(1e-3);
  expect_refusal("has been called before", [&] { scaler.step(optimizer); });
  optimizer.zero_grad();
  backward(0);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  optimizer.zero_grad();
  optimizer.update_in_backward();
  backward(0);
  expect_refusal("update_in_backward()", [&] { scaler.unscale_(optimizer); });
  optimizer.step();
}

TEST(Amp, JoinedRanksKeepCompany) {
  if (world().transport() == "hierarchy") return;  // refused with a fused optimizer
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
      optimizer.clip_grad_norm(1);
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
  for (const Way& way : kWays) {
    torch::manual_seed(1);
    Mlp net;
    DistributedDataParallel ddp(net, world());
    const Optimizer optimizer = way.make(ddp, net->parameters());
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
    EXPECT_LT(losses.back(), 0.8 * losses.front()) << way.name;
    EXPECT_TRUE(same_bits(net->first->weight.detach())) << way.name;
  }
}

}  // namespace
}  // namespace lockstep::tests
