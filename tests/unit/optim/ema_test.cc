// Compares Ema with a reference loop, and tests swapping, resuming and validation.
#include "lockstep/optim/ema.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::optim {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(1);
    linear = register_module("linear", torch::nn::Linear(40, 30));
    norm = register_module("norm", torch::nn::BatchNorm1d(30));
    large = register_parameter("large", torch::randn({300, 1001}).t());
    again = register_parameter("again", linear->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return norm->forward(linear->forward(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor large, again;
};

void change(torch::nn::Module& net, int step) {
  const at::NoGradGuard no_grad;
  torch::manual_seed(static_cast<std::uint64_t>(step));
  for (at::Tensor& one : net.parameters()) one.add_(torch::randn_like(one));
  for (at::Tensor& one : net.buffers()) one.add_(1);
}

/// Returns copies of the averages by name.
std::map<std::string, at::Tensor> averages_of(const Ema& ema) {
  std::map<std::string, at::Tensor> averages;
  for (const auto& [name, value] : checkpoint::clone_state(ema.state_dict()))
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) averages[name] = *tensor;
  return averages;
}

TEST(Ema, MatchesReferenceLoop) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const bool warm : {false, true}) {
      NetImpl net;
      net.to(dtype);
      EmaOptions options{.decay = 0.9, .buffers = true};
      if (warm) options.decay_schedule = ema_warmup(0.99);
      Ema ema(net, options);
      std::map<std::string, at::Tensor> expected;
      const auto all = [&] {
        auto named = net.named_parameters();
        for (const auto& item : net.named_buffers()) named.insert(item.key(), item.value());
        return named;
      };
      const auto state_type = dtype == at::kDouble ? at::kDouble : at::kFloat;
      for (const auto& item : all())
        if (item.value().is_floating_point()) expected[item.key()] = item.value().detach().to(state_type).clone();
      for (int step = 0; step < 30; ++step) {
        change(net, step);
        ema.update();
        const double decay = warm ? std::min(0.99, (1.0 + step) / (10.0 + step)) : 0.9;
        for (auto& [name, value] : expected) value = decay * value + (1 - decay) * all()[name].detach().to(state_type);
      }
      expected.erase("linear.weight");  // the same tensor as `again`, which is listed first
      EXPECT_EQ(checkpoint::value_of<std::int64_t>(ema.state_dict(), "n_averaged"), 30);
      const auto averages = averages_of(ema);
      ASSERT_EQ(averages.size(), expected.size());
      for (const auto& [name, value] : averages) {
        EXPECT_EQ(value.scalar_type(), state_type);
        EXPECT_TRUE(torch::allclose(value, expected.at(name), 1e-5, 1e-6)) << name;
      }
    }
}

TEST(Ema, SwapsAveragesInAndOut) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    NetImpl net;
    net.to(dtype);
    Ema ema(net, {.decay = 0.5});
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    change(net, 1);
    ema.update();
    const auto averages = averages_of(ema);
    std::vector<at::Tensor> before;
    std::vector<const void*> places;
    for (const at::Tensor& one : net.parameters()) {
      before.push_back(one.detach().clone());
      places.push_back(one.const_data_ptr());
    }
    const auto versions = [&] {
      std::vector<std::int64_t> all;
      for (const at::Tensor& one : net.parameters()) all.push_back(one._version());
      return all;
    };
    const auto seen = versions();
    {
      const auto swapped = ema.swap();
      for (const auto& [name, value] : averages) {
        EXPECT_TRUE(torch::equal(net.named_parameters()[name], value.to(dtype))) << name;
        EXPECT_TRUE(net.named_parameters()[name].requires_grad());
      }
      EXPECT_TRUE(net.linear->weight.const_data_ptr() == net.again.const_data_ptr());
      EXPECT_THROW(ema.update(), base::UsageError);
      EXPECT_THROW((void)ema.swap(), base::UsageError);
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(torch::equal(net.parameters()[i], before[i]));
      EXPECT_EQ(net.parameters()[i].const_data_ptr(), places[i]);
    }
    EXPECT_EQ(versions(), seen);
    net.forward(torch::randn({5, 40}).to(dtype)).sum().backward();
    optimizer.step();  // the optimizer still refers to the same parameters
    EXPECT_FALSE(torch::equal(net.linear->bias, before[2]) && torch::equal(net.linear->weight, before[1]));
    (void)ema.swap();
    ema.update();
  }
}

TEST(Ema, ResumesFromState) {
  NetImpl net;
  Ema first(net, {.decay_schedule = ema_warmup(0.99)});
  for (int step = 0; step < 5; ++step) {
    change(net, step);
    first.update();
  }
  Ema again(net, {.decay_schedule = ema_warmup(0.99)});
  const checkpoint::StateDict state = checkpoint::clone_state(first.state_dict());
  again.load_state_dict(state);
  change(net, 9);
  first.update();
  again.update();
  EXPECT_EQ(again.updates(), 6);
  for (const auto& [name, value] : averages_of(first)) EXPECT_TRUE(torch::equal(averages_of(again).at(name), value));

  const auto refuses = [&](const std::string& text, const checkpoint::StateDict& broken) {
    EXPECT_THAT(tests::message_of<base::UsageError>([&] { again.load_state_dict(broken); }),
                ::testing::HasSubstr(text));
  };
  checkpoint::StateDict broken = state;
  broken.erase(averages_of(first).begin()->first);
  refuses("is missing", broken);
  broken = state;
  broken["unknown"] = torch::ones({1});
  refuses("\"unknown\" does not belong to a parameter", broken);
  broken = state;
  broken[averages_of(first).begin()->first] = torch::ones({1});
  refuses("another shape", broken);
  broken = state;
  broken["n_averaged"] = std::int64_t{-1};
  refuses("n_averaged is -1", broken);
  EXPECT_EQ(again.updates(), 6);
}

TEST(Ema, RejectsInvalidArguments) {
  NetImpl net;
  struct NothingImpl : torch::nn::Module {
  } nothing;
  EXPECT_THROW(Ema(net, {.decay = 1.5}), base::UsageError);
  EXPECT_THROW(ema_warmup(-1), base::UsageError);
  EXPECT_THROW(Ema(nothing, {}), base::UsageError);
  Ema ema(net, {.decay_schedule = [](std::int64_t) { return 2.0; }});
  EXPECT_THROW(ema.update(), base::UsageError);
  EXPECT_EQ(ema.updates(), 0);
}

}  // namespace
}  // namespace lockstep::optim
