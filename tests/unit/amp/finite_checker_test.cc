// Tests which module and operation FiniteChecker reports.
#include "lockstep/amp/finite_checker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <thread>

#include "lockstep/amp/autocast.h"
#include "lockstep/base/error.h"

namespace lockstep::amp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Two linear layers and a batch norm.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  NetImpl()
      : first(register_module("first", torch::nn::Linear(4, 4))),
        second(register_module("second", torch::nn::Linear(4, 2))),
        norm(register_module("norm", torch::nn::BatchNorm1d(4))) {}
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(1);
  Net net;
  return net;
}

void set(torch::Tensor tensor, float value) {
  const torch::NoGradGuard off;
  tensor.view(-1)[0] = value;
}

/// Returns the text of the error that check() throws for `result`; "" if it does not throw.
std::string error_of(const FiniteChecker& finite, const torch::Tensor& result) {
  try {
    finite.check(result);
  } catch (const base::Error& error) {
    EXPECT_EQ(error.cause(), base::Cause::kNonFinite);
    return error.what();
  }
  return "";
}

TEST(FiniteChecker, AcceptsFiniteValues) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  const auto loss = net->second(net->norm(net->first(torch::ones({3, 4})).relu())).sum();
  loss.backward();
  EXPECT_EQ(error_of(finite, loss), "");
}

TEST(FiniteChecker, NamesFirstModuleWithNonFiniteOutput) {
  Net net = make_net();
  set(net->norm->weight, 3e38F);
  const FiniteChecker finite(*net);
  const auto loss = net->second(net->norm(net->first(torch::rand({3, 4})))).sum();
  EXPECT_THAT(error_of(finite, loss),
              AllOf(HasSubstr("the output of module 'norm' (aten::batch_norm) is not finite, [3, 4]: "),
                    HasSubstr("its inputs were finite"), Not(HasSubstr("second"))));
}

TEST(FiniteChecker, TracksViewsAndCastsOfParameters) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  const auto weight = net->second->weight.t().to(torch::kDouble);
  EXPECT_THAT(error_of(finite, torch::full({1, 4}, 1.5e308, torch::kDouble).matmul(weight * 10)),
              HasSubstr("the output of module 'second' (aten::matmul)"));
}

TEST(FiniteChecker, ChecksAutocastResults) {
  Net net = make_net();
  set(net->first->weight, 1e38F);
  const FiniteChecker finite(*net);
  const Autocast low;
  EXPECT_THAT(error_of(finite, net->second(net->first(torch::full({2, 4}, 1e3F)))),
              HasSubstr("module 'first' (aten::addmm)"));
}

TEST(FiniteChecker, NamesOperationBetweenModules) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  const auto hidden = torch::log(net->first(torch::ones({2, 4})) * 0);
  EXPECT_THAT(
      error_of(finite, net->second(hidden).sum()),
      AllOf(
          HasSubstr("an input of module 'second' (aten::addmm) is not finite"),
          HasSubstr(
              "before that, the output of aten::log after module 'first' is not finite, [2, 4]: min -inf, max -inf")));
}

TEST(FiniteChecker, NamesLastOperationOfNonFiniteResult) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  EXPECT_THAT(error_of(finite, torch::log(net->second(net->first(torch::ones({2, 4}))) * 0).mean()),
              HasSubstr("the output of aten::log after module 'second'"));
}

TEST(FiniteChecker, ReportsNonFiniteInput) {
  Net net = make_net();
  const auto batch = torch::full({1, 4}, kInf);
  const FiniteChecker finite(*net);
  EXPECT_THAT(error_of(finite, net->first(batch)),
              AllOf(HasSubstr("an input of module 'first' (aten::addmm)"), HasSubstr("min inf")));
}

TEST(FiniteChecker, AllowsMaskedSoftmax) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  const auto scores = net->first(torch::ones({4, 4})).masked_fill(torch::ones({4, 4}).triu(1).to(torch::kBool), -kInf);
  EXPECT_EQ(error_of(finite, net->second(scores.softmax(1)).sum()), "");
  EXPECT_EQ(error_of(finite, scores.softmax(1).sum()), "");
}

TEST(FiniteChecker, IgnoresUninitializedMemory) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  const auto loss = net->first(torch::ones({1, 4})).sum();
  auto memory = torch::empty({4});
  memory.fill_(0);
  EXPECT_EQ(error_of(finite, loss), "");
}

TEST(FiniteChecker, IgnoresBackward) {
  Net net = make_net();
  const FiniteChecker finite(*net);
  const auto loss = net->second(net->first(torch::ones({2, 4}))).sum();
  loss.backward(torch::full({}, kInf));
  EXPECT_FALSE(net->first->weight.grad().isfinite().all().item<bool>());
  EXPECT_EQ(error_of(finite, loss), "");
}

TEST(FiniteChecker, NestsWithSeparateModules) {
  Net one = make_net(), other = make_net();
  set(other->first->bias, kInf);
  const FiniteChecker outer(*one);
  const auto hidden = one->first(torch::ones({1, 4}));
  std::string inside;
  {
    const FiniteChecker inner(*other);
    inside = error_of(inner, other->first(hidden));
  }
  EXPECT_THAT(inside, HasSubstr("a parameter or buffer of module 'first' is not finite, [4]"));
  EXPECT_EQ(error_of(outer, one->second(hidden)), "");
  EXPECT_THAT(error_of(outer, one->second(hidden * kInf)),
              HasSubstr("an input of module 'second' (aten::addmm) is not finite"));
}

TEST(FiniteChecker, IgnoresOtherThreadsAndLaterCalls) {
  Net net = make_net();
  set(net->first->bias, kInf);
  {
    const FiniteChecker finite(*net);
  }
  const FiniteChecker finite(*net);
  std::thread([&] { net->first(torch::ones({1, 4})); }).join();
  EXPECT_EQ(error_of(finite, torch::ones({})), "");
}

TEST(FiniteChecker, NamesTopLevelModel) {
  torch::nn::Linear net(2, 2);
  set(net->weight, 3e38F);
  const FiniteChecker finite(*net);
  EXPECT_THAT(error_of(finite, net(torch::full({1, 2}, 10.0F))),
              HasSubstr("the output of the model itself (aten::addmm)"));
}

}  // namespace
}  // namespace lockstep::amp
