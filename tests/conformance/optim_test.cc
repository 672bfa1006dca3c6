// Fused optimizers: torch::optim's results on the mean of all ranks' gradients, whatever the transport.
#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/loops.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/ddp_models.h"

namespace lockstep::tests {
namespace {

using ddp::DistributedDataParallel;

bool on_shm() { return world().size() > 1 && world().transport() == "shm"; }

void backward(MlpImpl& net, int rank, int step) {
  net.forward(batch_of(rank, step, {4, 7}, net.first->weight.scalar_type())).pow(2).sum().backward();
}

/// Gives `reference` the mean of the gradients that all ranks compute from its values.
template <typename Net>
void mean_gradients(Net& reference, const std::function<void(Net&, int rank)>& run) {
  const auto means = mean_over_ranks([&](int rank) {
    reference.zero_grad();
    run(reference, rank);
    return gradients(reference);
  });
  const auto parameters = reference.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = means[i].defined() ? means[i].clone() : at::Tensor();
}

void expect_equal(torch::nn::Module& got, torch::nn::Module& expected, double tolerance) {
  const auto named = got.named_parameters();
  const auto wanted = expected.parameters();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(torch::allclose(named[i].value(), wanted[i], tolerance, tolerance))
        << named[i].key() << " differs by " << (named[i].value() - wanted[i]).abs().max().item<double>();
    EXPECT_TRUE(same_bits(named[i].value().detach())) << named[i].key();
  }
}

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
struct Kind {
  const char* name;
  std::function<Optimizer(DistributedDataParallel&)> fused;
  std::function<Optimizer(std::vector<at::Tensor>)> plain;
};

Kind sgd(const char* name, optim::SGDOptions options) {
  return {name, [options](auto& ddp) { return std::make_unique<optim::SGD>(ddp, options); },
          [o = options](auto parameters) {
            return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(o.lr).momentum(o.momentum).dampening(o.dampening).weight_decay(
                                                                       o.weight_decay).nesterov(o.nesterov));
          }};
}
Kind adam(const char* name, optim::AdamOptions options) {
  return {name, [options](auto& ddp) { return std::make_unique<optim::Adam>(ddp, options); },
          [o = options](auto parameters) {
            return std::make_unique<torch::optim::Adam>(
                parameters, torch::optim::AdamOptions(o.lr).betas({o.betas[0], o.betas[1]}).eps(o.eps).weight_decay(o.weight_decay).amsgrad(o.amsgrad));
          }};
}
Kind adamw(const char* name, optim::AdamWOptions options) {
  return {name, [options](auto& ddp) { return std::make_unique<optim::AdamW>(ddp, options); },
          [o = options](auto parameters) {
            return std::make_unique<torch::optim::AdamW>(
                parameters, torch::optim::AdamWOptions(o.lr).betas({o.betas[0], o.betas[1]}).eps(o.eps).weight_decay(o.weight_decay).amsgrad(o.amsgrad));
          }};
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      sgd("Sgd", {.lr = 0.02}),
      sgd("Momentum", {.lr = 0.02, .momentum = 0.9}),
      sgd("Nesterov", {.lr = 0.02, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true}),
      sgd("Dampened", {.lr = 0.02, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01}),
      adam("Adam", {.lr = 0.01}),
      adam("AdamDecay", {.lr = 0.01, .betas = {0.8, 0.99}, .eps = 1e-6, .weight_decay = 0.1}),
      adam("AmsGrad", {.lr = 0.01, .amsgrad = true}),
      adamw("AdamW", {.lr = 0.01}),
      adamw("AdamWAmsGrad", {.lr = 0.01, .weight_decay = 0.2, .amsgrad = true}),
  };
  return all;
}

class Fused : public ::testing::TestWithParam<std::size_t> {};

void train_beside_torch(const Kind& kind, at::ScalarType dtype, double tolerance) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  net->to(dtype);
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  reference->to(dtype);
  copy_values(*net, *reference);
  const Optimizer fused = kind.fused(ddp);
  const Optimizer plain = kind.plain(reference->parameters());
  for (int step = 0; step < 12; ++step) {
    fused->zero_grad();
    backward(*net, world().rank(), step);
    fused->step();
    mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    plain->step();
    expect_equal(*net, *reference, tolerance);
    // Rounding must not build up: what is compared is one step.
    copy_values(*net, *reference);
  }
}

TEST_P(Fused, IsTorchsOnTheMeanInDouble) { train_beside_torch(kinds()[GetParam()], at::kDouble, 1e-9); }
TEST_P(Fused, IsTorchsOnTheMeanInFloat) { train_beside_torch(kinds()[GetParam()], at::kFloat, 1e-5); }
INSTANTIATE_TEST_SUITE_P(Kinds, Fused, ::testing::Range<std::size_t>(0, 9), [](const auto& kind) { return kinds()[kind.param].name; });

/// The same bits as one process that adds in the order of the ranks, by the same loops.
TEST(Optim, BitsOfASerialReference) {
  if (!on_shm()) return;  // a sum over a wire is added in the wire's order
  torch::manual_seed(3);
  Mlp net(33, 40, 9);
  DistributedDataParallel ddp(net, world());
  optim::AdamW optimizer(ddp, {.lr = 0.01});
  Mlp reference(33, 40, 9);
  copy_values(*net, *reference);
  std::map<std::string, std::vector<at::Tensor>> states;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 33})).pow(2).sum().backward();
    optimizer.step();
    std::vector<std::vector<at::Tensor>> all;
    for (int rank = 0; rank < world().size(); ++rank) {
      reference->zero_grad();
      reference->forward(batch_of(rank, step, {4, 33})).pow(2).sum().backward();
      all.push_back(gradients(*reference));
    }
    const double now = step + 1;
    const optim::AdamRule rule = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2,
                                  .bias1 = 1 - std::pow(0.9, now), .bias2 = 1 - std::pow(0.999, now), .decoupled = true, .amsgrad = false};
    std::size_t i = 0;
    for (auto& item : reference->named_parameters()) {
      auto& state = states[item.key()];
      while (state.size() < 2) state.push_back(at::zeros_like(item.value().detach()));
      std::vector<const void*> pointers;
      for (const auto& one : all) pointers.push_back(one[i].const_data_ptr());
      void* addresses[] = {state[0].mutable_data_ptr(), state[1].mutable_data_ptr()};
      optim::update({.dtype = at::kFloat, .gradients = pointers.data(), .num_gradients = pointers.size(), .divisor = static_cast<double>(world().size()),
                     .parameter = item.value().mutable_data_ptr(), .states = addresses, .count = static_cast<std::size_t>(item.value().numel())},
                    rule);
      ++i;
    }
  }
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), reference->named_parameters()[item.key()])) << item.key();
    EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
  }
}

TEST(Optim, LowPrecisionKeepsItsStateInFloat) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    torch::manual_seed(1);
    Mlp net;
    net->to(dtype);
    DistributedDataParallel ddp(net, world());
    Mlp reference;
    reference->to(at::kFloat);
    copy_values(*net, *reference);
    optim::AdamW fused(ddp, {.lr = 0.01});
    torch::optim::AdamW plain(reference->parameters(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 5; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      fused.step();
      mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
      plain.step();
    }
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(torch::allclose(item.value().to(at::kFloat), reference->named_parameters()[item.key()], 3e-2, 3e-2)) << item.key();
      EXPECT_TRUE(same_bits(item.value().detach()));
    }
    for (const auto& [name, state] : fused.state_dict())
      EXPECT_EQ(state.scalar_type(), name.ends_with(".step") ? at::kLong : at::kFloat) << name;
  }
}

/// Parameters of many pieces, transposed ones, and one that shares its storage with another.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    torch::manual_seed(3);
    wide = register_module("wide", torch::nn::Linear(500, 1100));
    odd = register_parameter("odd", torch::randn({1100, 301}).t());
    const at::Tensor both = torch::randn({2, 301});
    left = register_parameter("left", both[0]);
    right = register_parameter("right", both[1]);
  }
  at::Tensor loss(int rank, int step) {
    return (torch::mm(torch::relu(wide->forward(batch_of(rank, step, {4, 500}))), odd.t()) * left + right).pow(2).mean() * 1e-3;
  }
  torch::nn::Linear wide{nullptr};
  at::Tensor odd, left, right;
};

TEST(Optim, ParametersOfSeveralPieces) {
  WideImpl net, reference;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1, .momentum = 0.9});
  torch::optim::SGD plain(reference.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    fused.zero_grad();
    net.loss(world().rank(), step).backward();
    fused.step();
    mean_gradients<WideImpl>(reference, [step](WideImpl& one, int rank) { one.loss(rank, step).backward(); });
    plain.step();
  }
  expect_equal(net, reference, 1e-5);
}

TEST(Optim, UnusedParametersStayAndThoseOfSomeRanksMove) {
  torch::manual_seed(1);
  Branchy net;
  DistributedDataParallel ddp(net, world());
  Branchy reference;
  copy_values(*net, *reference);
  optim::Adam fused(ddp, {.lr = 0.01, .weight_decay = 0.1});
  torch::optim::Adam plain(reference->parameters(), torch::optim::AdamOptions(0.01).weight_decay(0.1));
  for (int step = 0; step < 6; ++step) {
    // Head 0 on all ranks, head 1 on the last alone and in some steps, head 2 on none.
    const auto run = [step](BranchyImpl& one, int rank) {
      at::Tensor loss = one.forward(batch_of(rank, step, {3, 6}), 0).pow(2).sum();
      if (rank == world().size() - 1 && step % 2 == 1) loss = loss + one.forward(batch_of(rank, step, {3, 6}), 1).pow(2).sum();
      loss.backward();
    };
    fused.zero_grad();
    run(*net, world().rank());
    fused.step();
    mean_gradients<BranchyImpl>(*reference, run);
    plain.step();
    expect_equal(*net, *reference, 1e-5);
    copy_values(*net, *reference);
  }
  bool any = false;
  for (const auto& [name, state] : fused.state_dict()) {
    EXPECT_FALSE(name.starts_with("head2")) << name;
    if (name == "head1.weight.step") {
      EXPECT_EQ(state.item<std::int64_t>(), 3);
    }
    any |= name == "head1.weight.step";
  }
  EXPECT_TRUE(any);
}

TEST(Optim, SeveralBackwardsAddUp) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  copy_values(*net, *reference);
  optim::SGD fused(ddp, {.lr = 0.01, .momentum = 0.9});
  torch::optim::SGD plain(reference->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    fused.zero_grad();
    {
      const auto quiet = ddp.no_sync();
      backward(*net, world().rank(), 10 * step);
    }
    backward(*net, world().rank(), 10 * step + 1);
    fused.step();
    mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) {
      backward(one, rank, 10 * step);
      backward(one, rank, 10 * step + 1);
    });
    plain.step();
  }
  expect_equal(*net, *reference, 1e-5);
}

TEST(Optim, ClippingIsByTheNormOfTheMean) {
  torch::manual_seed(1);
  WideImpl net, reference;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  torch::optim::SGD plain(reference.parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    const double limit = step == 2 ? 1e6 : 1e-3;  // once so high that nothing is clipped
    fused.zero_grad();
    net.loss(world().rank(), step).backward();
    const double norm = fused.clip_grad_norm(limit);
    fused.step();
    mean_gradients<WideImpl>(reference, [step](WideImpl& one, int rank) { one.loss(rank, step).backward(); });
    const double expected = torch::nn::utils::clip_grad_norm_(reference.parameters(), limit);
    plain.step();
    EXPECT_NEAR(norm, expected, 1e-5 * expected);
    at::Tensor norms = torch::full({1}, norm, at::kDouble);
    EXPECT_TRUE(same_bits(norms));
    expect_equal(net, reference, 1e-6);
    copy_values(net, reference);
    if (step == 2) fused.change_parameters([] {});  // which changes nothing
  }
  // What was clipped and then thrown away does not scale the next gradients.
  net.loss(world().rank(), 7).backward();
  fused.clip_grad_norm(1e-9);
  fused.zero_grad();
  net.loss(world().rank(), 8).backward();
  fused.step();
  mean_gradients<WideImpl>(reference, [](WideImpl& one, int rank) { one.loss(rank, 8).backward(); });
  plain.step();
  expect_equal(net, reference, 1e-6);
}

TEST(Optim, AverageGradientsGivesThemToTheUser) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  copy_values(*net, *reference);
  optim::SGD fused(ddp, {.lr = 0.01});
  torch::optim::SGD plain(reference->parameters(), 0.01);
  for (int step = 0; step < 3; ++step) {
    fused.zero_grad();
    backward(*net, world().rank(), step);
    fused.average_gradients();
    mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    expect_gradients(*net, gradients(*reference));
    torch::nn::utils::clip_grad_value_(net->parameters(), 0.5);
    torch::nn::utils::clip_grad_value_(reference->parameters(), 0.5);
    EXPECT_NEAR(fused.clip_grad_norm(0.7), torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.7), 1e-5);
    fused.step();
    plain.step();
    expect_equal(*net, *reference, 1e-6);
  }
}

TEST(Optim, GroupsAndSchedulers) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  copy_values(*net, *reference);
  optim::AdamW fused(ddp, {.lr = 0.01}, {{.parameters = net->second->parameters(), .options = {.lr = 0.1, .weight_decay = 0}}});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(reference->first->parameters());
  groups.emplace_back(reference->second->parameters(), std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.1).weight_decay(0)));
  torch::optim::AdamW plain(groups, torch::optim::AdamWOptions(0.01));
  torch::optim::StepLR fused_schedule(fused, 2, 0.5), plain_schedule(plain, 2, 0.5);
  for (int step = 0; step < 6; ++step) {
    fused.zero_grad();
    backward(*net, world().rank(), step);
    fused.step();
    fused_schedule.step();
    mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    plain.step();
    plain_schedule.step();
    expect_equal(*net, *reference, 1e-5);
    copy_values(*net, *reference);
  }
  EXPECT_THROW(optim::SGD(ddp, {.lr = 0.1}), base::UsageError);  // the second of one DistributedDataParallel
}

TEST(Optim, WhatIsNotAllowedIsRefusedByName) {
  Mlp net, other;
  DistributedDataParallel ddp(net, world());
  const auto refuses = [&](const std::string& text, const std::function<void()>& make) {
    try {
      make();
      ADD_FAILURE() << "nothing refused: " << text;
    } catch (const base::UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refuses("lr is -1", [&] { optim::SGD(ddp, {.lr = -1}); });
  refuses("with nesterov", [&] { optim::SGD(ddp, {.nesterov = true}); });
  refuses("betas is 1.0", [&] { optim::AdamW(ddp, {.betas = {0.9, 1.0}}); });
  refuses("group 0", [&] { optim::Adam(ddp, {}, {{.parameters = other->parameters(), .options = {}}}); });
  refuses("group 1", [&] { optim::Adam(ddp, {}, {{.parameters = net->parameters(), .options = {}}, {.parameters = net->parameters(), .options = {}}}); });
  optim::SGD fused(ddp, {.lr = 0.1});
  refuses("max_norm is 0", [&] { fused.clip_grad_norm(0); });
  refuses("momentum is 0.5", [&] {
    static_cast<torch::optim::SGDOptions&>(fused.param_groups()[0].options()).momentum(0.5);
    fused.step();
  });
  // A part of something larger.
  struct PartImpl : torch::nn::Module {
    PartImpl() { register_parameter("w", torch::ones({10}).narrow(0, 0, 5)); }
  } part;
  DistributedDataParallel other_ddp(part, world());
  if (on_shm()) refuses("w is a part of a tensor", [&] { optim::SGD(other_ddp, {.lr = 0.1}); });
}

TEST(Optim, ChangesBehindItsBackAreNoticed) {
  if (!on_shm()) return;  // each rank has its own parameters, and averaged gradients
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  ASSERT_TRUE(fused.shares_parameters());
  const auto step = [&] { fused.step(); };
  backward(*net, world().rank(), 0);
  torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);  // of this rank's own gradients, through .data()
  EXPECT_THROW(step(), base::UsageError);
  EXPECT_THROW(fused.average_gradients(), base::UsageError);
  fused.zero_grad();
  backward(*net, world().rank(), 0);
  net->first->bias.mutable_grad().add_(1);
  EXPECT_THROW(step(), base::UsageError);
  fused.zero_grad();
  backward(*net, world().rank(), 0);
  step();
  {
    const at::NoGradGuard no_grad;
    net->first->weight.clamp_(-0.1, 0.1);
  }
  EXPECT_THROW(step(), base::UsageError);
  int calls = 0;
  fused.change_parameters([&] {
    ++calls;
    const at::NoGradGuard no_grad;
    net->first->weight.fill_(0.25);
  });
  at::Tensor all_calls = torch::tensor({calls});
  world().all_reduce(all_calls);
  EXPECT_EQ(all_calls.item<int>(), 1);
  EXPECT_TRUE(torch::equal(net->first->weight, torch::full({13, 7}, 0.25)));
  world().barrier();  // all have looked
  step();
  net->to(at::kDouble);
  EXPECT_THROW(step(), base::UsageError);
}

TEST(Optim, AGraphFromBeforeAnUpdateFails) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  backward(*net, world().rank(), 0);
  const at::Tensor late = net->forward(batch_of(world().rank(), 1, {4, 7})).pow(2).sum();
  fused.step();
  EXPECT_THROW(late.backward(), c10::Error);
}

TEST(Optim, ParametersAreOfTheirOwnAgainAfterwards) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const at::Tensor alias = net->first->weight.detach();  // refers to the same storage
  {
    optim::SGD fused(ddp, {.lr = 0.1});
    backward(*net, world().rank(), 0);
    fused.step();
    EXPECT_EQ(alias.data_ptr(), net->first->weight.data_ptr());
    EXPECT_TRUE(torch::equal(alias, net->first->weight));
  }
  EXPECT_TRUE(torch::equal(alias, net->first->weight));
  EXPECT_TRUE(same_bits(net->first->weight.detach()));
  {
    const at::NoGradGuard no_grad;
    net->first->weight.fill_(world().rank());
  }
  world().barrier();
  EXPECT_EQ(net->first->weight[0][0].item<int>(), world().rank());
  world().barrier();
  {
    const at::NoGradGuard no_grad;
    net->first->weight.fill_(0.5);
  }
  net->zero_grad();
  backward(*net, world().rank(), 1);  // averages again
  EXPECT_TRUE(same_bits(net->second->bias.grad()));
}

TEST(Optim, StateByNameGoesRound) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  std::vector<std::pair<std::string, at::Tensor>> saved;
  std::vector<at::Tensor> after;
  const auto steps = [&](torch::optim::Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      backward(*net, world().rank(), step);
      optimizer.step();
    }
  };
  std::vector<at::Tensor> middle;
  {
    optim::AdamW fused(ddp, {.lr = 0.01});
    EXPECT_TRUE(fused.state_dict().empty());
    steps(fused, 0, 3);
    saved = fused.state_dict();
    for (const at::Tensor& p : net->parameters()) middle.push_back(p.detach().clone());
    steps(fused, 3, 6);
    for (const at::Tensor& p : net->parameters()) after.push_back(p.detach().clone());
  }
  EXPECT_EQ(saved.size(), 4 * 3U);
  optim::AdamW again(ddp, {.lr = 0.01});
  again.change_parameters([&] {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < middle.size(); ++i) net->parameters()[i].copy_(middle[i]);
  });
  auto broken = saved;
  broken.emplace_back("nobody.exp_avg", at::zeros({1}));
  EXPECT_THROW(again.load_state_dict(broken), base::UsageError);
  broken = saved;
  broken.pop_back();
  EXPECT_THROW(again.load_state_dict(broken), base::UsageError);
  EXPECT_TRUE(again.state_dict().empty());
  again.load_state_dict(saved);
  steps(again, 3, 6);
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(torch::equal(net->parameters()[i], after[i]));
}

TEST(Optim, TorchsArchiveAndBroadcastWork) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  std::stringstream bytes;
  std::vector<std::pair<std::string, at::Tensor>> saved;
  {
    optim::SGD fused(ddp, {.lr = 0.01, .momentum = 0.9});
    for (int step = 0; step < 3; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      fused.step();
    }
    saved = fused.state_dict();
    torch::serialize::OutputArchive out;
    fused.save(out);
    out.save_to(bytes);
    ddp::broadcast_optimizer_state(fused, world());
    EXPECT_EQ(fused.state_dict().size(), saved.size());
  }
  optim::SGD again(ddp, {.lr = 0.5, .momentum = 0.9});
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  again.load(in);
  EXPECT_EQ(again.param_groups()[0].options().get_lr(), 0.01);
  const auto loaded = again.state_dict();
  ASSERT_EQ(loaded.size(), saved.size());
  for (std::size_t i = 0; i < saved.size(); ++i) EXPECT_TRUE(torch::equal(loaded[i].second, saved[i].second)) << saved[i].first;
  world().barrier();
  backward(*net, world().rank(), 9);
  again.step();
  EXPECT_TRUE(same_bits(net->first->weight.detach()));
}

TEST(Optim, JoinedRanksKeepCompany) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW fused(ddp, {.lr = 0.01});
  const int batches = 2 + world().rank();
  ddp::join(ddp, [&] {
    for (int step = 0; step < batches; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      fused.clip_grad_norm(1.0);
      fused.step();
    }
  });
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
  for (const auto& [name, state] : fused.state_dict()) {
    if (on_shm() && name.ends_with(".step")) {
      EXPECT_EQ(state.item<std::int64_t>(), 1 + world().size());
    }
  }
}

TEST(Optim, SparseGradientsAreRefused) {
  struct WordsImpl : torch::nn::Module {
    WordsImpl() { words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true))); }
    torch::nn::Embedding words{nullptr};
  } net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  net.words->forward(torch::tensor({1, 2})).sum().backward();
  EXPECT_THROW(fused.step(), base::UsageError);
}

TEST(Optim, WithoutItsDistributedDataParallelItSaysSo) {
  Mlp net;
  auto ddp = std::make_unique<DistributedDataParallel>(net, world());
  optim::SGD fused(*ddp, {.lr = 0.1});
  ddp.reset();
  if (!on_shm()) return;
  EXPECT_THROW(fused.step(), base::UsageError);
}

}  // namespace
}  // namespace lockstep::tests
