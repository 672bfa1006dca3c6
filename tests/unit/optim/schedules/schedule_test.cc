// Compares learning rate schedules with torch.optim.lr_scheduler of PyTorch, and tests saving, resuming and validation.
#include "lockstep/optim/schedules/schedule.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/optim/schedules/reduce_lr_on_plateau.h"
#include "lockstep/optim/schedules/scheduler.h"
#include "tests/support/temp_dir.h"

namespace lockstep::optim {
namespace {

constexpr int kSteps = 400;

/// A Python script that prints one line "NAME RATE RATE RATE..." per case and group, for two groups with base rates 0.3
/// and 0.05.
constexpr const char* kScript = R"(
import math, sys, warnings
import torch
from torch.optim import lr_scheduler as s
warnings.simplefilter('ignore')
STEPS = 400
out = open(sys.argv[1] + '/rates', 'w')
def run(name, make, step=lambda schedule, i: schedule.step(), steps=STEPS):
    p = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    o = torch.optim.SGD([{'params': [p[0]], 'lr': 0.3}, {'params': [p[1]], 'lr': 0.05}])
    schedule = make(o)
    rates = [[], []]
    for i in range(steps):
        for g in range(2): rates[g].append(o.param_groups[g]['lr'])
        o.step()
        step(schedule, i)
    for g in range(2): print(name, *[repr(float(r)) for r in rates[g]], file=out)
run('step', lambda o: s.StepLR(o, 30, 0.7))
run('exponential', lambda o: s.ExponentialLR(o, 0.99))
run('multi_step', lambda o: s.MultiStepLR(o, [10, 50, 50, 200], 0.3))
run('linear', lambda o: s.LinearLR(o, 0.2, 0.9, 70))
run('cosine', lambda o: s.CosineAnnealingLR(o, STEPS, 0.001))
run('polynomial', lambda o: s.PolynomialLR(o, 300, 1.7))
run('lambda', lambda o: s.LambdaLR(o, [lambda i: 0.95 ** i, lambda i: 1 / (1 + i)]))
run('warm_up_cosine', lambda o: s.SequentialLR(
    o, [s.LinearLR(o, 0.1, 1, 40), s.CosineAnnealingLR(o, STEPS - 40)], [40]))
run('three', lambda o: s.SequentialLR(
    o, [s.LinearLR(o, 0.1, 1, 40), s.ConstantLR(o, 1, 1), s.StepLR(o, 25, 0.5)], [40, 90]))
for anneal in ('cos', 'linear'):
    for three in (False, True):
        run('one_cycle_%s_%d' % (anneal, three), lambda o: s.OneCycleLR(
            o, [0.3, 0.05], total_steps=STEPS + 1, pct_start=0.23, anneal_strategy=anneal, cycle_momentum=False,
            div_factor=20, final_div_factor=1e3, three_phase=three))
metric = lambda i: math.sin(i * 0.7) * 3 + 10 / (1 + i)
for mode in ('min', 'max'):
    for threshold_mode in ('rel', 'abs'):
        run('plateau_%s_%s' % (mode, threshold_mode), lambda o: s.ReduceLROnPlateau(
            o, mode=mode, factor=0.6, patience=5, threshold=0.02, threshold_mode=threshold_mode, cooldown=3,
            min_lr=1e-3, eps=1e-6),
            step=lambda schedule, i: schedule.step(metric(i)))
)";

using Rates = std::map<std::string, std::vector<std::vector<double>>>;

class PyTorchParity : public ::testing::Test {
 protected:
  static const Rates& python() {
    static const Rates all = run_python();
    return all;
  }
  void SetUp() override {
    if (python().empty()) GTEST_SKIP() << "SKIPPED: the Python package torch is not in .deps/python";
  }
  /// Returns an optimizer with the two groups of the script.
  static torch::optim::SGD make_optimizer() {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const double rate : {0.3, 0.05})
      groups.emplace_back(std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())},
                          std::make_unique<torch::optim::SGDOptions>(rate));
    return torch::optim::SGD(groups, torch::optim::SGDOptions(1));
  }
  template <typename Step>
  static void expect(const std::string& name, torch::optim::Optimizer& optimizer, Step step) {
    ASSERT_TRUE(python().contains(name)) << name;
    const auto& expected = python().at(name);
    for (std::size_t i = 0; i < kSteps; ++i) {
      for (std::size_t group = 0; group < 2; ++group) {
        const double want = expected[group].at(i);
        ASSERT_NEAR(optimizer.param_groups()[group].options().get_lr(), want, 1e-12 * std::abs(want))
            << name << " of group " << group << " at step " << i;
      }
      step(i);
    }
  }
  static void expect(const std::string& name, const Schedule& schedule) {
    auto optimizer = make_optimizer();
    Scheduler scheduler(optimizer, schedule);
    expect(name, optimizer, [&](std::size_t) { scheduler.step(); });
  }

  void schedules();
  void lambda_per_group();
  void one_cycles();
  void resumed_plateaus();

 private:
  static Rates run_python() {
    const std::string python = LOCKSTEP_TEST_PYTHON;
    if (std::system(("\"" + python + "\" -c 'import torch' >/dev/null 2>&1").c_str()) != 0) return {};
    const tests::TempDir folder;
    const auto script = folder.write("script.py", kScript);
    if (std::system(("timeout 100 \"" + python + "\" " + script + " " + folder.path()).c_str()) != 0)
      throw std::runtime_error("the Python script failed");
    Rates all;
    std::ifstream file(folder / "rates");
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string name;
      words >> name;
      auto& rates = all[name].emplace_back();
      for (double rate = 0; words >> rate;) rates.push_back(rate);
    }
    return all;
  }
};

void PyTorchParity::schedules() {
  expect("step", step_decay({.every = 30, .factor = 0.7}));
  expect("exponential", step_decay({.factor = 0.99}));
  expect("multi_step", multi_step_decay({.milestones = {10, 50, 50, 200}, .factor = 0.3}));
  expect("linear", linear({.steps = 70, .from = 0.2, .to = 0.9}));
  expect("cosine", cosine_decay({.steps = kSteps, .min_lr = 0.001}));
  expect("polynomial", polynomial_decay({.steps = 300, .power = 1.7}));
  expect("warm_up_cosine", warmup(40, cosine_decay({.steps = kSteps - 40}), 0.1));
  expect("three", warmup(40, sequential(constant(), 50, step_decay({.every = 25, .factor = 0.5})), 0.1));
}

void PyTorchParity::lambda_per_group() {
  auto optimizer = make_optimizer();
  Scheduler scheduler(optimizer,
                      {lambda_schedule([](std::int64_t step) { return std::pow(0.95, step); }),
                       lambda_schedule([](std::int64_t step) { return 1.0 / static_cast<double>(1 + step); })});
  expect("lambda", optimizer, [&](std::size_t) { scheduler.step(); });
}

void PyTorchParity::one_cycles() {
  for (const bool linear : {false, true})
    for (const bool three : {false, true})
      expect(std::string("one_cycle_") + (linear ? "linear_" : "cos_") + (three ? "1" : "0"),
             one_cycle({.steps = kSteps + 1,
                        .pct_start = 0.23,
                        .div_factor = 20,
                        .final_div_factor = 1e3,
                        .linear = linear,
                        .three_phase = three}));
}

void PyTorchParity::resumed_plateaus() {
  for (const bool maximize : {false, true})
    for (const bool absolute : {false, true}) {
      auto optimizer = make_optimizer();
      const ReduceLROnPlateauOptions options{.maximize = maximize,
                                             .factor = 0.6,
                                             .patience = 5,
                                             .threshold = 0.02,
                                             .absolute_threshold = absolute,
                                             .cooldown = 3,
                                             .min_lr = 1e-3,
                                             .eps = 1e-6};
      auto plateau = std::make_unique<ReduceLROnPlateau>(optimizer, options);
      int reductions = 0;
      expect(std::string("plateau_") + (maximize ? "max" : "min") + (absolute ? "_abs" : "_rel"), optimizer,
             [&](std::size_t i) {
               const auto step = static_cast<double>(i);
               reductions += plateau->step(std::sin(step * 0.7) * 3 + 10 / (1 + step));
               const checkpoint::StateDict saved = plateau->state_dict();
               optimizer.param_groups()[0].options().set_lr(7);
               plateau = std::make_unique<ReduceLROnPlateau>(optimizer, options);
               plateau->load_state_dict(saved);
             });
      EXPECT_GT(reductions, 3);
    }
}

TEST_F(PyTorchParity, LearningRatesMatchPyTorch) {  // one test, because Python takes seconds to start
  schedules();
  lambda_per_group();
  one_cycles();
  resumed_plateaus();
}

TEST(Scheduler, ResumesFromState) {
  const at::Tensor p = torch::zeros({1}, torch::requires_grad());
  torch::optim::Adam first({p}, torch::optim::AdamOptions(0.2)), second({p}, torch::optim::AdamOptions(0.9));
  const Schedule schedule = warmup(5, polynomial_decay({.steps = 30}));
  Scheduler scheduler(first, schedule), resumed(second, schedule);
  EXPECT_EQ(scheduler.rates(), std::vector<double>{0});
  for (int i = 0; i < 12; ++i) scheduler.step();
  resumed.load_state_dict(scheduler.state_dict());
  EXPECT_EQ(checkpoint::value_of<std::int64_t>(resumed.state_dict(), "step"), 12);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(resumed.rates(), scheduler.rates());
    scheduler.step();
    resumed.step();
  }
  EXPECT_EQ(scheduler.rates(), std::vector<double>{0});
}

TEST(Schedule, KeepsLastRateAfterTheEnd) {
  EXPECT_EQ(cosine_decay({.steps = 10, .min_lr = 0.1})(25, 1), 0.1);
  EXPECT_EQ(one_cycle({.steps = 10})(9, 1), one_cycle({.steps = 10})(100, 1));
  EXPECT_NEAR(one_cycle({.steps = 10})(100, 1), 1 / 25e4, 1e-18);
  EXPECT_EQ(one_cycle({.steps = 1})(0, 1), 1 / 25e4);
  EXPECT_EQ(linear({.steps = 4})(9, 0.3), 0.3);
  EXPECT_EQ(constant()(9, 0.3), 0.3);
}

TEST(Schedule, RejectsInvalidOptionsByNameAndValue) {
  const auto refuses = [](const std::string& text, const std::function<void()>& make) {
    EXPECT_THAT(tests::message_of<base::UsageError>(make),
                ::testing::AllOf(::testing::HasSubstr(text), ::testing::HasSubstr("expected")));
  };
  const at::Tensor p = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer({p}, 0.1);
  refuses("every is 0", [] { step_decay({.every = 0}); });
  refuses("factor is -1", [] { step_decay({.factor = -1}); });
  refuses("milestone 1 is 3", [] { multi_step_decay({.milestones = {4, 3}}); });
  refuses("from is nan", [] { linear({.from = std::nan("")}); });
  refuses("steps is -2", [] { cosine_decay({.steps = -2}); });
  refuses("power is -1", [] { polynomial_decay({.power = -1}); });
  refuses("pct_start is 0.6", [] { one_cycle({.pct_start = 0.6, .three_phase = true}); });
  refuses("div_factor is 0", [] { one_cycle({.div_factor = 0}); });
  refuses("factor is empty", [] { lambda_schedule(nullptr); });
  refuses("a schedule is empty", [] { sequential(constant(), 3, nullptr); });
  refuses("sequential: steps is -1", [] { sequential(constant(), -1, constant()); });
  refuses("factor is 1", [&] { ReduceLROnPlateau(optimizer, {.factor = 1}); });
  refuses("patience is -1", [&] { ReduceLROnPlateau(optimizer, {.patience = -1}); });
  refuses("2 schedules", [&] { Scheduler(optimizer, {constant(), constant()}); });
  Scheduler scheduler(optimizer, constant());
  const auto load = [&](std::int64_t step, const checkpoint::StateDict& rates) {
    checkpoint::StateDict state = rates;
    state["step"] = step;
    scheduler.load_state_dict(state);
  };
  refuses("2 groups", [&] { load(3, {{"base_rate.0", 0.1}, {"base_rate.1", 0.2}}); });
  refuses("step is -3", [&] { load(-3, {{"base_rate.0", 0.1}}); });
  EXPECT_THROW(load(3, {{"rate.0", 0.1}}), base::UsageError);
  EXPECT_EQ(checkpoint::value_of<std::int64_t>(scheduler.state_dict(), "step"), 0);
}

}  // namespace
}  // namespace lockstep::optim
