// Tests that fused Adagrad, LAMB and LARS compute what torch or the papers define from the mean gradients, over each
// transport.
#include <gmock/gmock.h>

#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/lars.h"
#include "lockstep/optim/schedules/scheduler.h"
#include "tests/conformance/optim/optim_reference.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::optim_adagrad_lamb_lars_test {
namespace {

using ddp::DistributedDataParallel;
using Formula = std::function<void(std::size_t index, const at::Tensor& parameter, const at::Tensor& gradient)>;

/// One state tensor per parameter, which is initialized with zeros of the parameter's shape.
struct States {
  at::Tensor& of(std::size_t index, const at::Tensor& like) {
    if (!all.contains(index)) all[index] = at::zeros_like(like);
    return all[index];
  }
  std::map<std::size_t, at::Tensor> all;
};

double norm_of(const at::Tensor& tensor) { return tensor.to(at::kDouble).norm().item<double>(); }

/// Returns LAMB written with ATen: algorithm 2 of You et al., arXiv:1904.00962.
Formula lamb(std::function<optim::LAMBOptions(const at::Tensor&)> options_of) {
  return
      [options_of, moments = std::make_shared<std::array<States, 2>>(),
       step = std::make_shared<std::map<std::size_t, int>>()](std::size_t i, const at::Tensor& p, const at::Tensor& g) {
        const optim::LAMBOptions o = options_of(p);
        const int t = ++(*step)[i];
        at::Tensor& m = (*moments)[0].of(i, p);
        at::Tensor& v = (*moments)[1].of(i, p);
        m = o.betas[0] * m + (1 - o.betas[0]) * g;
        v = o.betas[1] * v + (1 - o.betas[1]) * g * g;
        const double bias1 = o.bias_correction ? 1 - std::pow(o.betas[0], t) : 1,
                     bias2 = o.bias_correction ? 1 - std::pow(o.betas[1], t) : 1;
        const at::Tensor r = (m / bias1) / ((v / bias2).sqrt() + o.eps) + o.weight_decay * p;
        const double ratio = o.adapt && norm_of(p) != 0 && norm_of(r) != 0 ? norm_of(p) / norm_of(r) : 1;
        p.sub_(o.lr * ratio * r);
      };
}

/// Returns LARS written with ATen: You, Gitman and Ginsburg, arXiv:1708.03888, with the learning rate outside of the
/// momentum.
Formula lars(std::function<optim::LARSOptions(const at::Tensor&)> options_of) {
  return [options_of, momentum = std::make_shared<States>()](std::size_t i, const at::Tensor& p, const at::Tensor& g) {
    const optim::LARSOptions o = options_of(p);
    const double w = norm_of(p), n = norm_of(g);
    const double ratio = o.adapt && w != 0 && n != 0 ? o.trust_coefficient * w / (n + o.weight_decay * w + o.eps) : 1;
    const at::Tensor d = ratio * (g + o.weight_decay * p);
    at::Tensor& v = momentum->of(i, p);
    v = o.momentum * v + d;
    p.sub_(o.lr * (o.nesterov ? d + o.momentum * v : v));
  };
}

Formula adagrad(optim::AdagradOptions o) {
  return [o, optimizers = std::make_shared<std::map<std::size_t, std::unique_ptr<torch::optim::Adagrad>>>()](
             std::size_t i, const at::Tensor& p, const at::Tensor& g) {
    auto& optimizer = (*optimizers)[i];
    if (!optimizer)
      optimizer = std::make_unique<torch::optim::Adagrad>(std::vector<at::Tensor>{p},
                                                          torch::optim::AdagradOptions(o.lr)
                                                              .lr_decay(o.lr_decay)
                                                              .weight_decay(o.weight_decay)
                                                              .initial_accumulator_value(o.initial_accumulator_value)
                                                              .eps(o.eps));
    optimizer->parameters()[0].mutable_grad() =
        g;  // this is the `p` of the first call, which refers to the same memory
    optimizer->step();
  };
}

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
struct OptimizerCase {
  std::string name;
  std::function<Optimizer(DistributedDataParallel&, torch::nn::Module&)> fused;
  std::function<Formula()> formula;
};

std::vector<at::Tensor> one_dimensional_parameters(torch::nn::Module& net) {
  std::vector<at::Tensor> all = net.parameters();
  std::erase_if(all, [](const at::Tensor& one) { return one.dim() != 1; });
  return all;
}

template <typename Fused, typename Options>
OptimizerCase make_kind(const std::string& name, Options options, Formula (*formula)(Options),
                        optim::FusedOptions how = {}) {
  return {name,
          [=](auto& ddp, auto&) {
            return std::make_unique<Fused>(ddp, options, std::vector<typename Fused::Group>(), how);
          },
          [=] { return formula(options); }};
}
/// One-dimensional parameters have no weight decay and no adaptive rate.
template <typename Fused, typename Options>
OptimizerCase layerwise(const std::string& name, Options options,
                        Formula (*formula)(std::function<Options(const at::Tensor&)>), optim::FusedOptions how = {}) {
  Options other = options;
  other.weight_decay = 0;
  other.adapt = false;
  return {name,
          [=](auto& ddp, auto& net) {
            return std::make_unique<Fused>(
                ddp, options, std::vector<typename Fused::Group>{{one_dimensional_parameters(net), other}}, how);
          },
          [=] { return formula([=](const at::Tensor& p) { return p.dim() == 1 ? other : options; }); }};
}

const std::vector<OptimizerCase>& optimizer_cases() {
  static const std::vector<OptimizerCase> all = {
      make_kind<optim::Adagrad>("Adagrad", optim::AdagradOptions{.lr = 0.05}, adagrad),
      make_kind<optim::Adagrad>(
          "AdagradDecay",
          optim::AdagradOptions{
              .lr = 0.05, .lr_decay = 0.3, .weight_decay = 0.1, .initial_accumulator_value = 0.2, .eps = 1e-5},
          adagrad),
      layerwise<optim::LAMB>("Lamb", optim::LAMBOptions{.lr = 0.02, .weight_decay = 0.1}, lamb),
      layerwise<optim::LAMB>("LambUncorrected",
                             optim::LAMBOptions{.lr = 0.02, .betas = {0.8, 0.99}, .bias_correction = false}, lamb),
      layerwise<optim::LARS>("Lars", optim::LARSOptions{.lr = 0.02, .weight_decay = 0.1, .trust_coefficient = 0.5},
                             lars),
      layerwise<optim::LARS>(
          "LarsNesterov", optim::LARSOptions{.lr = 0.02, .momentum = 0.7, .trust_coefficient = 0.5, .nesterov = true},
          lars),
      make_kind<optim::Adagrad>(
          "AdagradByOperations",
          optim::AdagradOptions{
              .lr = 0.05, .lr_decay = 0.3, .weight_decay = 0.1, .initial_accumulator_value = 0.2, .eps = 1e-5},
          adagrad, {.foreach = true}),
      layerwise<optim::LAMB>("LambByOperations", optim::LAMBOptions{.lr = 0.02, .weight_decay = 0.1}, lamb,
                             {.foreach = true}),
      layerwise<optim::LARS>(
          "LarsByOperations",
          optim::LARSOptions{
              .lr = 0.02, .momentum = 0.7, .weight_decay = 0.1, .trust_coefficient = 0.5, .nesterov = true},
          lars, {.foreach = true}),
  };
  return all;
}

class FusedAgainstFormula : public ::testing::TestWithParam<std::size_t> {};

template <typename Net>
void apply(const Formula& formula, Net& net) {
  const at::NoGradGuard no_grad;
  const auto parameters = net.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].grad().defined()) formula(i, parameters[i].detach(), parameters[i].grad());
}

void compare_with_formula(const OptimizerCase& variant, at::ScalarType dtype, double tolerance) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  net->to(dtype);
  DistributedDataParallel ddp(net, world());
  Mlp reference;
  reference->to(dtype);
  copy_values(*net, *reference);
  const Optimizer fused = variant.fused(ddp, *net);
  const Formula formula = variant.formula();
  for (int step = 0; step < 6; ++step) {
    fused->zero_grad();
    backward(*net, world().rank(), step);
    fused->step();
    set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
    apply(formula, *reference);
    expect_equal(*net, *reference, tolerance);
    copy_values(*net, *reference);  // so that rounding does not accumulate
  }
}

TEST_P(FusedAgainstFormula, MatchesFormulaInDouble) {
  compare_with_formula(optimizer_cases()[GetParam()], at::kDouble, 1e-12);
}
TEST_P(FusedAgainstFormula, MatchesFormulaInFloat) {
  compare_with_formula(optimizer_cases()[GetParam()], at::kFloat, 1e-6);
}

TEST_P(FusedAgainstFormula, LowPrecisionKeepsItsStateInFloat) {
  const OptimizerCase& variant = optimizer_cases()[GetParam()];
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    torch::manual_seed(1);
    Mlp net;
    net->to(dtype);
    DistributedDataParallel ddp(net, world());
    Mlp reference;
    copy_values(*net, *reference);
    const Optimizer fused = variant.fused(ddp, *net);
    const Formula formula = variant.formula();
    for (int step = 0; step < 4; ++step) {
      fused->zero_grad();
      backward(*net, world().rank(), step);
      fused->step();
      set_mean_gradients<MlpImpl>(*reference, [step](MlpImpl& one, int rank) { backward(one, rank, step); });
      apply(formula, *reference);
      for (const auto& item : net->named_parameters()) {
        EXPECT_TRUE(torch::allclose(item.value().to(at::kFloat), reference->named_parameters()[item.key()], 3e-2, 3e-2))
            << item.key();
        EXPECT_TRUE(same_bits(item.value().detach()));
      }
      copy_values(*net, *reference);
    }
    for (const auto& [name, state] : dynamic_cast<optim::FusedOptimizer&>(*fused).state_dict())
      EXPECT_EQ(std::get<at::Tensor>(state).scalar_type(), name.ends_with(".step") ? at::kLong : at::kFloat) << name;
  }
}

/// Parameters of many chunks: norms cover whole parameters.
TEST_P(FusedAgainstFormula, LargeParametersAndClipping) {
  const OptimizerCase& variant = optimizer_cases()[GetParam()];
  WideImpl net, reference;
  DistributedDataParallel ddp(net, world());
  const Optimizer fused = variant.fused(ddp, net);
  const Formula formula = variant.formula();
  for (int step = 0; step < 4; ++step) {
    fused->zero_grad();
    net.loss(world().rank(), step).backward();
    if (step == 3) optim::clip_grad_value(*fused, 1e-5);
    if (step == 1) optim::clip_grad_norm(*fused, 1e-4);
    fused->step();
    set_mean_gradients<WideImpl>(reference, [step](WideImpl& one, int rank) { one.loss(rank, step).backward(); });
    if (step == 1) torch::nn::utils::clip_grad_norm_(reference.parameters(), 1e-4);
    if (step == 3) torch::nn::utils::clip_grad_value_(reference.parameters(), 1e-5);
    apply(formula, reference);
    expect_equal(net, reference,
                 1e-4);  // Adagrad's first step has the full length even if a gradient is only a rounding error
    copy_values(net, reference);
    dynamic_cast<optim::FusedOptimizer&>(*fused).change_parameters([] {});
  }
}

TEST_P(FusedAgainstFormula, ManyStepsAreReproducibleBitwiseOnAllRanks) {
  std::vector<at::Tensor> before;
  for (int run = 0; run < 2; ++run) {
    torch::manual_seed(1);
    Mlp net;
    DistributedDataParallel ddp(net, world());
    const Optimizer fused = optimizer_cases()[GetParam()].fused(ddp, *net);
    optim::Scheduler scheduler(*fused, optim::warmup(5, optim::cosine_decay({.steps = 50})));
    for (int step = 0; step < 50; ++step) {
      fused->zero_grad();
      backward(*net, world().rank(), step);
      fused->step();
      scheduler.step();
    }
    const auto after = net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) {
      EXPECT_TRUE(same_bits(after[i].detach()));
      EXPECT_TRUE(torch::isfinite(after[i]).all().item<bool>());
      if (run == 0)
        before.push_back(after[i].detach().clone());
      else
        EXPECT_TRUE(torch::equal(before[i], after[i])) << i;
    }
  }
}

TEST_P(FusedAgainstFormula, StateRoundTrip) {
  const OptimizerCase& variant = optimizer_cases()[GetParam()];
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  Mlp middle;
  checkpoint::StateDict saved;
  std::stringstream bytes;
  std::vector<at::Tensor> after;
  const auto steps = [&](torch::optim::Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      backward(*net, world().rank(), step);
      optimizer.step();
    }
  };
  {
    const Optimizer fused = variant.fused(ddp, *net);
    steps(*fused, 0, 3);
    saved = checkpoint::clone_state(dynamic_cast<optim::FusedOptimizer&>(*fused).state_dict());
    torch::serialize::OutputArchive out;
    fused->save(out);
    out.save_to(bytes);
    copy_values(*net, *middle);
    steps(*fused, 3, 6);
    for (const at::Tensor& one : net->parameters()) after.push_back(one.detach().clone());
    ddp::broadcast_optimizer_state(*fused, world());
  }
  for (const bool archive : {false, true}) {
    copy_values(*middle, *net);
    world().barrier();
    const Optimizer again = variant.fused(ddp, *net);
    if (archive) {
      steps(*again, 8, 9);
      dynamic_cast<optim::FusedOptimizer&>(*again).change_parameters([&] { copy_values(*middle, *net); });
      torch::serialize::InputArchive in;
      in.load_from(bytes);
      again->load(in);
    } else {
      steps(*again, 8, 10);  // makes a state, which loading must replace, even by an empty one
      dynamic_cast<optim::FusedOptimizer&>(*again).load_state_dict({});
      dynamic_cast<optim::FusedOptimizer&>(*again).change_parameters([&] { copy_values(*middle, *net); });
      dynamic_cast<optim::FusedOptimizer&>(*again).load_state_dict(saved);
    }
    steps(*again, 3, 6);
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_TRUE(torch::allclose(net->parameters()[i], after[i], 1e-6, 1e-6)) << i << " " << archive;
  }
}

/// A parameter that is missing in a state_dict() has not been updated: it starts with its initial state.
TEST_P(FusedAgainstFormula, MissingStateStartsFresh) {
  const OptimizerCase& variant = optimizer_cases()[GetParam()];
  Mlp start;
  const auto first_step = [&](bool loaded) {
    Mlp net;
    copy_values(*start, *net);
    DistributedDataParallel ddp(net, world());
    const Optimizer fused = variant.fused(ddp, *net);
    auto& ours = dynamic_cast<optim::FusedOptimizer&>(*fused);
    if (loaded) {
      backward(*net, world().rank(), 5);
      fused->step();
      fused->zero_grad();
      ours.change_parameters([&] { copy_values(*start, *net); });
      ours.load_state_dict({});
    }
    backward(*net, world().rank(), 0);
    fused->step();
    return net->first->weight.detach().clone();
  };
  EXPECT_TRUE(torch::allclose(first_step(true), first_step(false), 1e-7, 1e-7));
}

INSTANTIATE_TEST_SUITE_P(Kinds, FusedAgainstFormula, ::testing::Range<std::size_t>(0, optimizer_cases().size()),
                         [](const auto& one) { return optimizer_cases()[one.param].name; });

TEST(OptimAdagradLambLars, InvalidOptionsAreRejected) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const auto expect_usage_error = [&](const std::string& text, const std::function<void()>& make) {
    EXPECT_THAT(tests::message_of<base::UsageError>(make), ::testing::HasSubstr(text));
  };
  expect_usage_error("Adagrad: lr_decay is -1", [&] { optim::Adagrad(ddp, {.lr_decay = -1}); });
  expect_usage_error("initial_accumulator_value of a group is 1", [&] {
    optim::Adagrad(ddp, {}, {{.parameters = {net->first->weight}, .options = {.initial_accumulator_value = 1}}});
  });
  expect_usage_error("LAMB: one of betas is 1; expected", [&] { optim::LAMB(ddp, {.betas = {0.9, 1.0}}); });
  expect_usage_error("LARS: trust_coefficient is 0", [&] { optim::LARS(ddp, {.trust_coefficient = 0}); });
  expect_usage_error("LARS: momentum is 0", [&] { optim::LARS(ddp, {.momentum = 0, .nesterov = true}); });
  optim::LAMB fused(ddp);
  expect_usage_error("norms of whole parameters", [&] { fused.update_in_backward(); });
}

TEST(OptimAdagradLambLars, JoinedRanksShadowOthers) {
  if (world().transport() == "hierarchy") return;  // across hosts, ranks do not exchange how many updates each makes
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::LAMB fused(ddp, {.lr = 0.01});
  const int batches = 2 + world().rank();
  ddp::join(ddp, [&] {
    for (int step = 0; step < batches; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      fused.step();
    }
  });
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
}

}  // namespace
}  // namespace lockstep::tests::optim_adagrad_lamb_lars_test
