// Tests that fused optimizers compute what torch::optim computes from the mean gradients, over each transport.
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/kernels/kernels.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/optim/optim_reference.h"

namespace lockstep::tests::optim_test {
namespace {

using ddp::DistributedDataParallel;

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
struct OptimizerCase {
  const char* name;
  std::function<Optimizer(DistributedDataParallel&)> fused;
  std::function<Optimizer(std::vector<at::Tensor>)> plain;
};

OptimizerCase sgd(const char* name, optim::SGDOptions options, optim::FusedOptions how = {}) {
  return {name,
          [=](auto& ddp) { return std::make_unique<optim::SGD>(ddp, options, std::vector<optim::SGD::Group>(), how); },
          [o = options](auto parameters) {
            return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(o.lr)
                                                                       .momentum(o.momentum)
                                                                       .dampening(o.dampening)
                                                                       .weight_decay(o.weight_decay)
                                                                       .nesterov(o.nesterov));
          }};
}
OptimizerCase adam(const char* name, optim::AdamOptions options, optim::FusedOptions how = {}) {
  return {
      name,
      [=](auto& ddp) { return std::make_unique<optim::Adam>(ddp, options, std::vector<optim::Adam::Group>(), how); },
      [o = options](auto parameters) {
        return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(o.lr)
                                                                    .betas({o.betas[0], o.betas[1]})
                                                                    .eps(o.eps)
                                                                    .weight_decay(o.weight_decay)
                                                                    .amsgrad(o.amsgrad));
      }};
}
OptimizerCase adamw(const char* name, optim::AdamWOptions options, optim::FusedOptions how = {}) {
  return {
      name,
      [=](auto& ddp) { return std::make_unique<optim::AdamW>(ddp, options, std::vector<optim::AdamW::Group>(), how); },
      [o = options](auto parameters) {
        return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(o.lr)
                                                                     .betas({o.betas[0], o.betas[1]})
                                                                     .eps(o.eps)
                                                                     .weight_decay(o.weight_decay)
                                                                     .amsgrad(o.amsgrad));
      }};
}

const std::vector<OptimizerCase>& optimizer_cases() {
  static const std::vector<OptimizerCase> all = {
      sgd("Sgd", {.lr = 0.02}),
      sgd("Momentum", {.lr = 0.02, .momentum = 0.9}),
      sgd("Nesterov", {.lr = 0.02, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true}),
      sgd("Dampened", {.lr = 0.02, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01}),
      adam("Adam", {.lr = 0.01}),
      adam("AdamDecay", {.lr = 0.01, .betas = {0.8, 0.99}, .eps = 1e-6, .weight_decay = 0.1}),
      adam("AmsGrad", {.lr = 0.01, .amsgrad = true}),
      adamw("AdamW", {.lr = 0.01}),
      adamw("AdamWAmsGrad", {.lr = 0.01, .weight_decay = 0.2, .amsgrad = true}),
      sgd("SgdByOperations", {.lr = 0.02, .weight_decay = 0.1}, {.foreach = true}),
      sgd("NesterovByOperations", {.lr = 0.02, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true},
          {.foreach = true}),
      sgd("DampenedByOperations", {.lr = 0.02, .momentum = 0.9, .dampening = 0.3}, {.foreach = true}),
      adam("AdamByOperations", {.lr = 0.01, .weight_decay = 0.1, .amsgrad = true}, {.foreach = true}),
      adamw("AdamWByOperations", {.lr = 0.01, .weight_decay = 0.1}, {.foreach = true}),
  };
  return all;
}

class FusedAgainstTorch : public ::testing::TestWithParam<std::size_t> {};

void compare_with_torch(const OptimizerCase& variant, at::ScalarType dtype, double tolerance) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  net->to(dtype);
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  reference->to(dtype);
  copy_values(*net, *reference);
  const Optimizer fused = variant.fused(ddp);
  const Optimizer plain = variant.plain(reference->parameters());
  for (int step = 0; step < 5; ++step) {
    fused->zero_grad();
    backward(*net, world().rank(), step);
    fused->step();
    set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    plain->step();
    expect_equal(*net, *reference, tolerance);
    // The next step starts from equal values, so that rounding does not accumulate.
    copy_values(*net, *reference);
  }
}

TEST_P(FusedAgainstTorch, MatchesTorchInDouble) {
  compare_with_torch(optimizer_cases()[GetParam()], at::kDouble, 1e-9);
}
TEST_P(FusedAgainstTorch, MatchesTorchInFloat) { compare_with_torch(optimizer_cases()[GetParam()], at::kFloat, 1e-5); }
INSTANTIATE_TEST_SUITE_P(All, FusedAgainstTorch, ::testing::Range<std::size_t>(0, optimizer_cases().size()),
                         [](const auto& variant) { return optimizer_cases()[variant.param].name; });

/// The reference is one process that adds in rank order with the same kernels.
TEST(Optim, EqualsSerialReferenceBitwise) {
  if (!on_shm()) return;  // over other transports the transport determines the order of additions
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
    const optim::kernels::AdamScalars rule = {.lr = 0.01,
                                              .beta1 = 0.9,
                                              .beta2 = 0.999,
                                              .eps = 1e-8,
                                              .weight_decay = 1e-2,
                                              .bias_correction1 = 1 - std::pow(0.9, now),
                                              .bias_correction2 = 1 - std::pow(0.999, now),
                                              .decoupled = true,
                                              .amsgrad = false};
    std::size_t i = 0;
    for (auto& item : reference->named_parameters()) {
      auto& state = states[item.key()];
      while (state.size() < 2) state.push_back(at::zeros_like(item.value().detach()));
      std::vector<const void*> pointers;
      for (const auto& one : all) pointers.push_back(one[i].const_data_ptr());
      void* addresses[] = {state[0].mutable_data_ptr(), state[1].mutable_data_ptr()};
      optim::kernels::kernels().adam({.dtype = at::kFloat,
                                      .gradients = pointers.data(),
                                      .num_gradients = pointers.size(),
                                      .divisor = static_cast<double>(world().size()),
                                      .parameter = item.value().mutable_data_ptr(),
                                      .states = addresses,
                                      .count = static_cast<std::size_t>(item.value().numel())},
                                     rule);
      ++i;
    }
  }
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), reference->named_parameters()[item.key()])) << item.key();
    EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
  }
}

/// Runs 200 steps from the same start. Returns the parameters.
std::vector<at::Tensor> run_two_hundred_steps(bool fused) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const OptimizerCase& variant = optimizer_cases()[2];
  const Optimizer optimizer = fused ? variant.fused(ddp) : variant.plain(net->parameters());
  for (int step = 0; step < 200; ++step) {
    optimizer->zero_grad();
    backward(*net, world().rank(), step);
    optimizer->step();
  }
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

TEST(Optim, TwoHundredStepsAreReproducibleBitwiseOnAllRanks) {
  if (world().size() > 4) return;  // to limit the time
  for (const bool fused : {false, true}) {
    const auto first = run_two_hundred_steps(fused), again = run_two_hundred_steps(fused);
    for (std::size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(torch::equal(first[i], again[i])) << "parameter " << i << ", fused " << fused;
      EXPECT_TRUE(same_bits(first[i])) << "parameter " << i << ", fused " << fused;
      EXPECT_TRUE(torch::isfinite(first[i]).all().item<bool>());
    }
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
      set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
      plain.step();
    }
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(torch::allclose(item.value().to(at::kFloat), reference->named_parameters()[item.key()], 3e-2, 3e-2))
          << item.key();
      EXPECT_TRUE(same_bits(item.value().detach()));
    }
    for (const auto& [name, state] : fused.state_dict())
      EXPECT_EQ(std::get<at::Tensor>(state).scalar_type(), name.ends_with(".step") ? at::kLong : at::kFloat) << name;
  }
}

TEST(Optim, LargeParameters) {
  WideImpl net, reference;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1, .momentum = 0.9});
  torch::optim::SGD plain(reference.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    fused.zero_grad();
    net.loss(world().rank(), step).backward();
    fused.step();
    set_mean_gradients<WideImpl>(reference, [step](WideImpl& one, int rank) { one.loss(rank, step).backward(); });
    plain.step();
  }
  expect_equal(net, reference, 1e-5);
}

TEST(Optim, UnusedAndPartlyUsedParameters) {
  torch::manual_seed(1);
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  MultiHead reference;
  copy_values(*net, *reference);
  optim::Adam fused(ddp, {.lr = 0.01, .weight_decay = 0.1});
  torch::optim::Adam plain(reference->parameters(), torch::optim::AdamOptions(0.01).weight_decay(0.1));
  for (int step = 0; step < 6; ++step) {
    // All ranks use head 0, only the last rank uses head 1 in some steps, and no rank uses head 2.
    const auto run = [step](MultiHeadImpl& one, int rank) {
      at::Tensor loss = one.forward(batch_of(rank, step, {3, 6}), 0).pow(2).sum();
      if (rank == world().size() - 1 && step % 2 == 1)
        loss = loss + one.forward(batch_of(rank, step, {3, 6}), 1).pow(2).sum();
      loss.backward();
    };
    fused.zero_grad();
    run(*net, world().rank());
    fused.step();
    set_mean_gradients<MultiHeadImpl>(*reference, run);
    plain.step();
    expect_equal(*net, *reference, 1e-5);
    copy_values(*net, *reference);
  }
  bool any = false;
  for (const auto& [name, state] : fused.state_dict()) {
    EXPECT_FALSE(name.starts_with("head2")) << name;
    if (name == "head1.weight.step") {
      EXPECT_EQ(std::get<at::Tensor>(state).item<std::int64_t>(), 3);
    }
    any |= name == "head1.weight.step";
  }
  EXPECT_TRUE(any);
  const checkpoint::StateDict in_use = fused.state_dict(), again = fused.state_dict(),
                              copies = checkpoint::clone_state(in_use);
  ASSERT_EQ(copies.size(), in_use.size());
  for (const auto& [name, value] : in_use) {
    const at::Tensor& tensor = std::get<at::Tensor>(value);
    EXPECT_EQ(tensor.is_alias_of(std::get<at::Tensor>(again.at(name))), !name.ends_with(".step")) << name;
    EXPECT_FALSE(tensor.is_alias_of(std::get<at::Tensor>(copies.at(name)))) << name;
    EXPECT_TRUE(tensor.equal(std::get<at::Tensor>(copies.at(name)))) << name;
  }
}

TEST(Optim, SeveralBackwardsAccumulate) {
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
      const auto no_sync_guard = ddp.no_sync();
      backward(*net, world().rank(), 10 * step);
    }
    backward(*net, world().rank(), 10 * step + 1);
    fused.step();
    set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) {
      backward(one, rank, 10 * step);
      backward(one, rank, 10 * step + 1);
    });
    plain.step();
  }
  expect_equal(*net, *reference, 1e-5);
}

TEST(Optim, ClipNormUsesMeanGradients) {
  torch::manual_seed(1);
  WideImpl net, reference;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  torch::optim::SGD plain(reference.parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    const double limit = step == 2 ? 1e6 : 1e-3;  // in one step nothing is clipped
    fused.zero_grad();
    net.loss(world().rank(), step).backward();
    const double norm = optim::clip_grad_norm(fused, limit).item<double>();
    fused.step();
    set_mean_gradients<WideImpl>(reference, [step](WideImpl& one, int rank) { one.loss(rank, step).backward(); });
    const double expected = torch::nn::utils::clip_grad_norm_(reference.parameters(), limit);
    plain.step();
    EXPECT_NEAR(norm, expected, 1e-5 * expected);
    at::Tensor norms = torch::full({1}, norm, at::kDouble);
    EXPECT_TRUE(same_bits(norms));
    expect_equal(net, reference, 1e-6);
    copy_values(net, reference);
    if (step == 2) fused.change_parameters([] {});
  }
  // A clip_grad_norm() whose gradients are then discarded must not scale the next gradients.
  net.loss(world().rank(), 7).backward();
  optim::clip_grad_norm(fused, 1e-9);
  fused.zero_grad();
  net.loss(world().rank(), 8).backward();
  fused.step();
  set_mean_gradients<WideImpl>(reference, [](WideImpl& one, int rank) { one.loss(rank, 8).backward(); });
  plain.step();
  expect_equal(net, reference, 1e-6);
}

/// The limit applies to mean gradients after they are scaled by the norm.
TEST(Optim, ClipValueUsesMeanGradients) {
  for (const bool by_norm : {false, true}) {
    torch::manual_seed(1);
    WideImpl net, reference;
    DistributedDataParallel ddp(net, world());
    optim::SGD fused(ddp, {.lr = 0.1, .momentum = 0.5});
    torch::optim::SGD plain(reference.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    for (int step = 0; step < 4; ++step) {
      fused.zero_grad();
      net.loss(world().rank(), step).backward();
      set_mean_gradients<WideImpl>(reference, [step](WideImpl& one, int rank) { one.loss(rank, step).backward(); });
      if (by_norm) {
        optim::clip_grad_norm(fused, 1.0);
        torch::nn::utils::clip_grad_norm_(reference.parameters(), 1.0);
      }
      const double limit =
          0.3 * torch::cat({reference.parameters()[0].grad().flatten(), reference.parameters()[1].grad().flatten()})
                    .abs()
                    .max()
                    .item<double>();
      if (step != 2) {
        optim::clip_grad_value(fused, 2 * limit);
        optim::clip_grad_value(fused, limit);  // the smaller limit applies
        torch::nn::utils::clip_grad_value_(reference.parameters(), limit);
      }
      fused.step();
      plain.step();
      expect_equal(net, reference, 1e-6);
      copy_values(net, reference);
      fused.change_parameters([] {});
    }
    // A clip_grad_value() whose gradients are then discarded must not clip the next gradients.
    net.loss(world().rank(), 7).backward();
    optim::clip_grad_value(fused, 1e-9);
    fused.zero_grad();
    net.loss(world().rank(), 8).backward();
    fused.step();
    set_mean_gradients<WideImpl>(reference, [](WideImpl& one, int rank) { one.loss(rank, 8).backward(); });
    plain.step();
    expect_equal(net, reference, 1e-6);
  }
}

TEST(Optim, AverageGradientsWritesMeansToGrad) {
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
    set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    expect_gradients(*net, gradients(*reference));
    torch::nn::utils::clip_grad_value_(net->parameters(), 0.5);
    torch::nn::utils::clip_grad_value_(reference->parameters(), 0.5);
    EXPECT_NEAR(optim::clip_grad_norm(fused, 0.7).item<double>(),
                torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.7), 1e-5);
    fused.step();
    plain.step();
    expect_equal(*net, *reference, 1e-6);
  }
}

TEST(Optim, NormCoversOnlyCurrentGradients) {
  torch::manual_seed(1);
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.01});
  double norms[3] = {};
  for (int step = 0; step < 3; ++step) {  // head 0, head 1, and head 0 again with the same values
    fused.zero_grad();
    net->forward(batch_of(world().rank(), 0, {3, 6}), step % 2).pow(2).sum().backward();
    norms[step] = optim::clip_grad_norm(fused, 1e9).item<double>();
  }
  EXPECT_NEAR(norms[0], norms[2], 1e-6 * norms[0]);  // near, because buckets may have been planned again in between
  EXPECT_GT(std::abs(norms[0] - norms[1]), 1e-3 * norms[0]);
}

/// torch 2.15 takes options that have the value of a new object for ones that nobody has set.
TEST(Optim, GroupsKeepOptionsThatAreTorchsDefaults) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const std::vector<at::Tensor> biases = {net->first->bias, net->second->bias};
  optim::SGD sgd(ddp, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}, {{biases, {.lr = 0.2}}});
  const auto& of_biases = static_cast<const torch::optim::SGDOptions&>(sgd.param_groups()[1].options());
  EXPECT_EQ(of_biases.lr(), 0.2);
  EXPECT_EQ(of_biases.weight_decay(), 0);
  EXPECT_EQ(of_biases.momentum(), 0);
}

TEST(Optim, ParamGroupsAndSchedulers) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  copy_values(*net, *reference);
  optim::AdamW fused(ddp, {.lr = 0.01},
                     {{.parameters = net->second->parameters(), .options = {.lr = 0.1, .weight_decay = 0}}});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(reference->first->parameters());
  groups.emplace_back(reference->second->parameters(),
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.1).weight_decay(0)));
  torch::optim::AdamW plain(groups, torch::optim::AdamWOptions(0.01));
  torch::optim::StepLR fused_schedule(fused, 2, 0.5), plain_schedule(plain, 2, 0.5);
  for (int step = 0; step < 6; ++step) {
    fused.zero_grad();
    backward(*net, world().rank(), step);
    fused.step();
    fused_schedule.step();
    set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    plain.step();
    plain_schedule.step();
    expect_equal(*net, *reference, 1e-5);
    copy_values(*net, *reference);
  }
  EXPECT_THROW(optim::SGD(ddp, {.lr = 0.1}), base::UsageError);  // a second optimizer of one DistributedDataParallel
}

}  // namespace
}  // namespace lockstep::tests::optim_test
