#include "lockstep/checkpoint/optimizer_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::message_of;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
}

void train(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(step));
    optimizer.zero_grad();
    net->forward(torch::randn({5, 3})).pow(2).mean().backward();
    optimizer.step();
  }
}

std::vector<torch::optim::OptimizerParamGroup> two_groups(torch::nn::Sequential& net, bool reversed = false) {
  std::vector<at::Tensor> all = net->parameters(), first(all.begin(), all.begin() + 2),
                          second(all.begin() + 2, all.end());
  if (reversed) std::reverse(second.begin(), second.end());
  return {torch::optim::OptimizerParamGroup(first), torch::optim::OptimizerParamGroup(second)};
}

const std::pair<const char*, std::function<Optimizer(torch::nn::Sequential&)>> kOptimizers[] = {
    {"Adam",
     [](auto& net) {
       return std::make_unique<torch::optim::Adam>(two_groups(net), torch::optim::AdamOptions(0.01).amsgrad(true));
     }},
    {"AdamW",
     [](auto& net) {
       return std::make_unique<torch::optim::AdamW>(two_groups(net),
                                                    torch::optim::AdamWOptions(0.01).betas({0.8, 0.9}));
     }},
    {"SGD",
     [](auto& net) {
       return std::make_unique<torch::optim::SGD>(two_groups(net),
                                                  torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
     }},
    {"plain SGD",
     [](auto& net) { return std::make_unique<torch::optim::SGD>(two_groups(net), torch::optim::SGDOptions(0.1)); }},
    {"RMSprop",
     [](auto& net) {
       return std::make_unique<torch::optim::RMSprop>(two_groups(net),
                                                      torch::optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
     }},
    {"Adagrad",
     [](auto& net) {
       return std::make_unique<torch::optim::Adagrad>(two_groups(net), torch::optim::AdagradOptions(0.1));
     }},
};

TEST(OptimizerState, ResumedRunEqualsUninterruptedRun) {
  for (const auto& [name, make] : kOptimizers)
    for (const bool python : {false, true}) {
      auto uninterrupted = make_net(), interrupted = make_net();
      const auto optimizer = make(uninterrupted), before = make(interrupted);
      train(uninterrupted, *optimizer, 0, 6);
      train(interrupted, *before, 0, 3);
      before->param_groups()[1].options().set_lr(0.02);
      const StateDict state = optimizer_state_dict(*before, *interrupted);
      const Value tree = python_optimizer_state(*before);
      const auto after = make(interrupted);
      if (python)
        load_python_optimizer_state(*after, tree);
      else
        load_optimizer_state_dict(*after, *interrupted, state);
      EXPECT_EQ(after->param_groups()[1].options().get_lr(), 0.02) << name;
      after->param_groups()[1].options().set_lr(optimizer->param_groups()[1].options().get_lr());
      train(interrupted, *after, 3, 6);
      for (std::size_t i = 0; i < uninterrupted->parameters().size(); ++i)
        EXPECT_TRUE(uninterrupted->parameters()[i].equal(interrupted->parameters()[i])) << name << " " << i;
    }
}

TEST(OptimizerState, UsesModuleNamesInAnyOrder) {
  auto net = make_net(), other = make_net();
  torch::optim::AdamW one(two_groups(net), 0.01), two(two_groups(other, true), 0.01);
  train(net, one, 0, 3);
  const StateDict state = optimizer_state_dict(one, *net);
  EXPECT_TRUE(state.contains("1.bias.exp_avg"));
  EXPECT_EQ(value_of<std::int64_t>(state, "0.weight.step"), 3);
  EXPECT_EQ(value_of<double>(state, "group.1.lr"), 0.01);
  load_optimizer_state_dict(two, *other, state);
  const StateDict again = optimizer_state_dict(two, *other);
  EXPECT_TRUE(value_of<at::Tensor>(again, "1.weight.exp_avg").equal(value_of<at::Tensor>(state, "1.weight.exp_avg")));
  EXPECT_FALSE(
      value_of<at::Tensor>(again, "1.weight.exp_avg").is_alias_of(value_of<at::Tensor>(state, "1.weight.exp_avg")));
}

TEST(OptimizerState, MismatchLeavesOptimizerUnchanged) {
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), 0.01);
  train(net, optimizer, 0, 2);
  const StateDict good = optimizer_state_dict(optimizer, *net);
  const auto reason = [&](const std::function<void(StateDict&)>& change) {
    StateDict state = good;
    change(state);
    return message_of<base::UsageError>([&] { load_optimizer_state_dict(optimizer, *net, state); });
  };
  EXPECT_THAT(reason([](auto& state) { state.erase("0.weight.step"); }),
              HasSubstr("the state has no value \"0.weight.step\""));
  EXPECT_THAT(reason([](auto& state) { state["0.weight.step"] = 1.0; }), HasSubstr("is a number; expected an integer"));
  EXPECT_THAT(reason([](auto& state) { state["0.weight.exp_avg"] = torch::ones({2}); }),
              HasSubstr("\"0.weight.exp_avg\" has another shape or kind of numbers"));
  EXPECT_THAT(reason([](auto& state) { state["0.weight.exp_avg"] = torch::ones({4, 3}, torch::kInt64); }),
              HasSubstr("kind of numbers (real, complex, integer) than its parameter"));
  EXPECT_THAT(reason([](auto& state) { state.erase("0.weight.exp_avg_sq"); }),
              HasSubstr("the state has no value \"0.weight.exp_avg_sq\""));
  EXPECT_THAT(reason([](auto& state) { state["group.0.amsgrad"] = true; }),
              HasSubstr("the state has no value \"0.weight.max_exp_avg_sq\""));
  EXPECT_THAT(reason([](auto& state) { state["0.weight.more"] = 1.0; }),
              HasSubstr("the value \"0.weight.more\", which the optimizer does not have"));
  EXPECT_THAT(reason([](auto& state) { state["missing.step"] = std::int64_t{1}; }), HasSubstr("\"missing.step\""));
  EXPECT_THAT(reason([](auto& state) { state["group.0.lr"] = true; }), HasSubstr("\"group.0.lr\" is a bool"));
  EXPECT_EQ(value_of<std::int64_t>(optimizer_state_dict(optimizer, *net), "0.weight.step"), 2);
  auto other_net = make_net();
  EXPECT_THAT(message_of<base::UsageError>([&] { optimizer_state_dict(optimizer, *other_net); }),
              HasSubstr("a parameter that the module does not have"));
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_THAT(message_of<base::UsageError>([&] { optimizer_state_dict(lbfgs, *net); }),
              HasSubstr("expected torch's Adam, AdamW, SGD, RMSprop or Adagrad"));
  EXPECT_THAT(message_of<base::UsageError>([&] { load_python_optimizer_state(optimizer, Value(1)); }),
              HasSubstr("\"param_groups\" is missing"));
}

constexpr const char* kOptimizerScript = R"(
import sys
import torch
folder = sys.argv[1]
def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
def data(step):
    return torch.load(folder + '/data.pt', weights_only=True)[step]
def step(n, o, i):
    o.zero_grad(); n(data(i)).pow(2).mean().backward(); o.step()
made = {'Adam': lambda p: torch.optim.Adam(p, 0.01), 'AdamW': lambda p: torch.optim.AdamW(p, 0.01),
        'SGD': lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        'RMSprop': lambda p: torch.optim.RMSprop(p, 0.01), 'Adagrad': lambda p: torch.optim.Adagrad(p, 0.1)}
for name, make in made.items():
    n = net(); n.load_state_dict(torch.load(folder + '/' + name + '.model.pt', weights_only=True))
    o = make(n.parameters()); o.load_state_dict(torch.load(folder + '/' + name + '.optimizer.pt', weights_only=True))
    for i in (2, 3): step(n, o, i)
    torch.save(n.state_dict(), folder + '/' + name + '.model2.pt')
    torch.save(o.state_dict(), folder + '/' + name + '.optimizer2.pt')
)";

// Two steps in C++, two in Python and two in C++ equal six steps in C++.
TEST(OptimizerState, RoundTripsThroughPython) {
  const std::string python = LOCKSTEP_TEST_PYTHON;
  if (std::system(("\"" + python + "\" -c 'import torch' >/dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << "SKIPPED: the Python package torch is not in .deps/python";
  const tests::TempDir folder;
  using Make = std::function<Optimizer(std::vector<at::Tensor>)>;
  const std::pair<std::string, Make> kinds[] = {
      {"Adam", [](auto p) { return std::make_unique<torch::optim::Adam>(p, 0.01); }},
      {"AdamW", [](auto p) { return std::make_unique<torch::optim::AdamW>(p, 0.01); }},
      {"SGD",
       [](auto p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9)); }},
      {"RMSprop", [](auto p) { return std::make_unique<torch::optim::RMSprop>(p, 0.01); }},
      {"Adagrad", [](auto p) { return std::make_unique<torch::optim::Adagrad>(p, 0.1); }}};
  Sequence data;
  for (int i = 0; i < 6; ++i) {
    torch::manual_seed(static_cast<std::uint64_t>(i));
    data.items.emplace_back(torch::randn({5, 3}));
  }
  save_torch_file(data, folder / "data.pt");
  std::map<std::string, std::vector<at::Tensor>> want;
  for (const auto& [name, make] : kinds) {
    auto net = make_net(), uninterrupted = make_net();
    const auto optimizer = make(net->parameters()), never_stopped = make(uninterrupted->parameters());
    train(net, *optimizer, 0, 2);
    train(uninterrupted, *never_stopped, 0, 6);
    want[name] = uninterrupted->parameters();
    save(net, folder / (name + ".model.pt"));
    save_torch_file(python_optimizer_state(*optimizer), folder / (name + ".optimizer.pt"));
  }
  ASSERT_EQ(std::system(
                ("timeout 100 \"" + python + "\" " + folder.write("script.py", kOptimizerScript) + " " + folder.path())
                    .c_str()),
            0);
  for (const auto& [name, make] : kinds) {
    auto net = make_net();
    load(net, folder / (name + ".model2.pt"));
    const auto optimizer = make(net->parameters());
    load_python_optimizer_state(*optimizer, load_torch_file(folder / (name + ".optimizer2.pt")));
    train(net, *optimizer, 4, 6);
    for (std::size_t i = 0; i < want[name].size(); ++i)
      EXPECT_TRUE(net->parameters()[i].allclose(want[name][i], 1e-5, 1e-6)) << name << " " << i;
  }
}

}  // namespace
}  // namespace lockstep::checkpoint
