#include "bench/ranks/models.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/base/error.h"

namespace lockstep::bench {
namespace {

struct ExpectedModel {
  const char* name;
  std::int64_t parameters;
};
// tests/procs/bench/bench.py expects the same numbers of bench/baselines/models.py.
constexpr ExpectedModel kModels[] = {{"mlp-50m", 50'343'936},
                                     {"mlp-65m", 65'561'600},
                                     {"mlp-6m", 6'297'600},
                                     {"transformer-2m", 1'902'976},
                                     {"cnn-1m", 1'097'610}};

TEST(Models, HaveTheExpectedParametersAndLearn) {
  for (const ExpectedModel& model : kModels) {
    torch::manual_seed(1);
    const auto task = make_task(model.name);
    std::int64_t parameters = 0;
    for (const at::Tensor& parameter : task->net().parameters()) parameters += parameter.numel();
    EXPECT_EQ(parameters, model.parameters) << model.name;
    if (parameters > 10'000'000) continue;
    torch::optim::SGD optimizer(task->net().parameters(), 0.05);
    double first = 0, last = 0;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = task->loss(task->forward(2));
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, first) << model.name;
  }
}

TEST(Models, RejectUnknownModels) { EXPECT_THROW(make_task("gpt"), base::UsageError); }

}  // namespace
}  // namespace lockstep::bench
