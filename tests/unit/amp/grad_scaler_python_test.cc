// Compares GradScaler with PyTorch's torch.amp.GradScaler over the same gradients.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "lockstep/amp/grad_scaler.h"
#include "tests/support/temp_dir.h"

namespace lockstep::amp {
namespace {

using nlohmann::json;

constexpr const char* kScript = R"(
import json, struct, sys, torch
folder = sys.argv[1]
steps = json.load(open(folder + '/steps'))
values = {'inf': float('inf'), '-inf': float('-inf'), 'nan': float('nan')}
weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
optimizers = [torch.optim.SGD([w], lr=0.125) for w in weights]
scaler = torch.amp.GradScaler('cpu', init_scale=64.0, growth_factor=3.0, backoff_factor=0.7, growth_interval=5)
seen = []
for step in steps:
    if 'interval' in step: scaler.set_growth_interval(step['interval'])
    made = []
    for weight, optimizer, gradient in zip(weights, optimizers, step['gradients']):
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([values.get(g, g) for g in gradient])).sum()).backward()
        before = weight.detach().clone()
        if step['unscale']: scaler.unscale_(optimizer)
        scaler.step(optimizer)
        made.append(not torch.equal(before, weight))
    if 'scale' in step: scaler.update(step['scale'])
    else: scaler.update()
    bits = [struct.unpack('<3I', struct.pack('<3f', *w.tolist())) for w in weights]
    seen.append({'scale': scaler.get_scale(), 'made': made, 'weights': bits, 'state': scaler.state_dict()})
json.dump(seen, open(folder + '/seen', 'w'))
other = torch.amp.GradScaler('cpu')
other.load_state_dict(json.load(open(folder + '/state')))
other.scale(torch.ones(()))
expected = {'scale': 48.0, 'growth_factor': 3.0, 'backoff_factor': 0.25, 'growth_interval': 7, '_growth_tracker': 2}
assert other.state_dict() == expected, other.state_dict()
)";

/// Returns 500 steps of two optimizers, in which one in fifteen gradients is not finite.
json make_steps() {
  std::mt19937 random(7);
  const auto below = [&](unsigned limit) { return static_cast<int>(random() % limit); };
  const char* bad[] = {"inf", "-inf", "nan"};
  json steps = json::array();
  for (int i = 0; i < 500; ++i) {
    json step{{"unscale", below(3) == 0}};
    for (int k = 0; k < 2; ++k) {
      json gradient = json::array();
      for (int e = 0; e < 3; ++e) gradient.push_back((below(2) ? 1 : -1) * (1 + below(1000)) / 1024.0);
      if (below(15) == 0) gradient[static_cast<std::size_t>(below(3))] = bad[below(3)];
      if (below(40) == 0) gradient[0] = 3e38;  // infinite after scaling
      step["gradients"].push_back(gradient);
    }
    if (i % 50 == 49) step["interval"] = 1 + below(9);
    if (i % 120 == 119) step["scale"] = 1.5 * (1 + below(100));
    steps.push_back(step);
  }
  return steps;
}

at::Tensor tensor_of(const json& gradient) {
  std::vector<float> values;
  for (const json& value : gradient) {
    const double inf = std::numeric_limits<double>::infinity();
    values.push_back(static_cast<float>(value.is_number() ? value.get<double>()
                                        : value == "inf"  ? inf
                                        : value == "-inf" ? -inf
                                                          : std::nan("")));
  }
  return torch::tensor(values);
}

json json_of(const checkpoint::StateDict& state) {
  json all;
  for (const auto& [name, value] : state)
    if (const auto* const number = std::get_if<double>(&value))
      all[name] = *number;
    else
      all[name] = std::get<std::int64_t>(value);
  return all;
}

json bits_of(const at::Tensor& weight) {
  json bits = json::array();
  for (int e = 0; e < 3; ++e) bits.push_back(std::bit_cast<std::uint32_t>(weight[e].item<float>()));
  return bits;
}

TEST(GradScalerPyTorchParity, MatchesScaleAndStepsOver500Gradients) {
  const std::string python = LOCKSTEP_TEST_PYTHON;
  if (std::system(("\"" + python + "\" -c 'import torch' >/dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << "SKIPPED: PyTorch is not in .deps/python";
  const tests::TempDir folder;
  const json steps = make_steps();
  folder.write("steps", steps.dump());
  GradScaler saved({.init_scale = 48, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 7});
  checkpoint::StateDict state = saved.state_dict();
  state["_growth_tracker"] = std::int64_t{2};
  saved.load_state_dict(state);
  folder.write("state", json_of(saved.state_dict()).dump());
  const std::string script = folder.write("script.py", kScript);
  ASSERT_EQ(std::system(("\"" + python + "\" \"" + script + "\" \"" + folder.path() + "\"").c_str()), 0);
  const json seen = json::parse(std::ifstream(folder / "seen"));

  const std::vector<at::Tensor> weights{torch::ones({3}, at::requires_grad()), torch::ones({3}, at::requires_grad())};
  std::vector<torch::optim::SGD> optimizers;
  for (const at::Tensor& weight : weights) optimizers.emplace_back(std::vector{weight}, 0.125);
  GradScaler scaler(
      {.init_scale = 64, .growth_factor = 3, .backoff_factor = 0.7, .growth_interval = 5, .warn_below = 0});
  int skipped = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const json& step = steps[i];
    if (step.contains("interval")) scaler.set_growth_interval(step["interval"]);
    for (std::size_t k = 0; k < 2; ++k) {
      optimizers[k].zero_grad();
      scaler.scale((weights[k] * tensor_of(step["gradients"][k])).sum()).backward();
      if (step["unscale"]) scaler.unscale_(optimizers[k]);
      const bool made = scaler.step(optimizers[k]);
      skipped += !made;
      ASSERT_EQ(json(made), seen[i]["made"][k]) << "step " << i;
      ASSERT_EQ(bits_of(weights[k]), seen[i]["weights"][k]) << "step " << i;
    }
    step.contains("scale") ? scaler.update(step["scale"].get<double>()) : scaler.update();
    ASSERT_EQ(scaler.get_scale(), seen[i]["scale"].get<double>()) << "step " << i;
    ASSERT_EQ(json_of(scaler.state_dict()), seen[i]["state"]) << "step " << i;
  }
  EXPECT_GT(skipped, 60);
  EXPECT_LT(skipped, 200);
}

}  // namespace
}  // namespace lockstep::amp
