#include "lockstep/train/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"

namespace lockstep::training {
namespace {

TEST(Metrics, AccumulateSumsAndCounts) {
  Metrics metrics;
  metrics.add("loss", 2.0, 4);
  metrics.add("loss", torch::tensor(1.0F), 2);
  metrics.add("loss", torch::full({1, 1}, 5.0), 1);
  metrics.add("acc", torch::tensor(1), 3);
  const auto sums = metrics.sums();
  EXPECT_EQ(sums.at("loss"), (Metrics::Sum{2.0 * 4 + 1 * 2 + 5, 7}));
  EXPECT_EQ(sums.at("acc"), (Metrics::Sum{3, 3}));
  metrics.clear();
  EXPECT_TRUE(metrics.empty());
}

TEST(Metrics, ManySmallValuesAreAddedInDoublePrecision) {
  Metrics metrics;
  for (int i = 0; i < 100000; ++i) metrics.add("x", torch::tensor(0.1F));
  EXPECT_NEAR(metrics.sums().at("x").sum, 100000 * static_cast<double>(0.1F), 1e-6);
}

// A scalar view of a larger tensor is not always the first element in its memory.
TEST(Metrics, ReadViewsCorrectly) {
  Metrics metrics;
  const at::Tensor numbers = torch::tensor({1.0F, 2.0F, 3.0F});
  metrics.add("third", numbers[2]);
  metrics.add("negative", torch::imag(torch::complex(numbers, numbers).conj())[1]);
  metrics.add("sparse", torch::sparse_coo_tensor(torch::zeros({1, 1}, torch::kLong), torch::tensor({4.0F}), {1}));
  metrics.add("half", torch::tensor(0.5F).to(torch::kBFloat16));
  const auto sums = metrics.sums();
  EXPECT_EQ(sums.at("third").sum, 3);
  EXPECT_EQ(sums.at("negative").sum, -2);
  EXPECT_EQ(sums.at("sparse").sum, 4);
  EXPECT_EQ(sums.at("half").sum, 0.5);
}

TEST(Metrics, DoNotKeepTheGraph) {
  Metrics metrics;
  const auto weight = torch::ones({}, torch::requires_grad());
  metrics.add("loss", weight * 2);
  EXPECT_EQ(metrics.sums().at("loss").sum, 2);
  EXPECT_FALSE((weight * 2).detach().requires_grad());
}

TEST(Metrics, DoNotSynchronizeOnAdd) {
  Metrics metrics;
  for (int i = 0; i < 3; ++i)
    metrics.add("x", torch::ones({}, torch::kMeta), 2);  // meta tensors have no values to read
  EXPECT_FALSE(metrics.empty());
}

TEST(Metrics, ReportNonFiniteNamesOnce) {
  Metrics metrics;
  metrics.add("good", 1.0);
  metrics.add("b", std::numeric_limits<double>::quiet_NaN());
  metrics.add("a", torch::tensor(std::numeric_limits<float>::infinity()));
  metrics.add("b", std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(metrics.take_non_finite_names(), testing::ElementsAre("b", "a"));
  EXPECT_THAT(metrics.take_non_finite_names(), testing::IsEmpty());
  EXPECT_TRUE(std::isnan(metrics.sums().at("b").sum));
}

TEST(Metrics, RejectInvalidValues) {
  Metrics metrics;
  EXPECT_THROW(metrics.add("x", torch::ones({2})), base::UsageError);
  EXPECT_THROW(metrics.add("x", torch::Tensor()), base::UsageError);
  EXPECT_THROW(metrics.add("", 1.0), base::UsageError);
  EXPECT_THROW(metrics.add("a\nb", 1.0), base::UsageError);
  EXPECT_THROW(metrics.add("x", 1.0, 0), base::UsageError);
  EXPECT_TRUE(metrics.empty());
}

TEST(Metrics, RoundTripExactlyThroughText) {
  const std::map<std::string, Metrics::Sum> sums{{"a name of words", {0.1 + 0.2, 3}},
                                                 {"inf", {std::numeric_limits<double>::infinity(), 1}},
                                                 {"tiny", {5e-324, 1e300}}};
  EXPECT_EQ(sums_from_text(to_text(sums)), sums);
  const auto nan = sums_from_text(to_text({{"x", {std::nan(""), 2}}}));
  EXPECT_TRUE(std::isnan(nan.at("x").sum));
  EXPECT_TRUE(sums_from_text("").empty());
}

TEST(Metrics, RejectMalformedText) {
  for (const char* text : {"x", "0x1p+0 0x1p+0", "0x1p+0 0x1p+0 ", "0x1p+0 0x0p+0 x", "0x1p+0 -0x1p+0 x",
                           "1 1 x\n1 1 x\n", "a b c", "1 nan x"})
    EXPECT_THROW(sums_from_text(text), base::FormatError) << text;
}

TEST(Metrics, RestoreSavedSums) {
  Metrics first, second;
  first.add("x", 3.0, 2);
  second.add(first.sums());
  second.add("x", 1.0, 1);
  EXPECT_EQ(second.sums().at("x"), (Metrics::Sum{7, 3}));
}

}  // namespace
}  // namespace lockstep::training
