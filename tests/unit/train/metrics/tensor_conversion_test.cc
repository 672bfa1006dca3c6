#include "lockstep/train/metrics/tensor_conversion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::training {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;
using tests::message_of;

TEST(TensorConversion, HistogramCountsAllElements) {
  const auto tensor = torch::arange(12, torch::requires_grad().dtype(torch::kFloat)).view({3, 4}).t();
  const Histogram histogram = make_histogram(tensor);
  EXPECT_EQ(histogram.num_finite, 12);
  EXPECT_EQ(histogram.sum, 66);
  EXPECT_EQ(histogram.max, 11);
  EXPECT_EQ(make_histogram(tensor.to(torch::kBFloat16)).sum, 66);
  EXPECT_EQ(make_histogram(torch::full({2}, (std::int64_t{1} << 40) + 1)).max, 1099511627777.0);
  EXPECT_EQ(make_histogram(torch::empty({0})).num_finite, 0);
  EXPECT_EQ(message_of<base::UsageError>([] { make_histogram(torch::zeros({2}, torch::kComplexFloat)); }),
            "make_histogram(): the tensor is ComplexFloat[2]; expected a real dtype");
}

TEST(TensorConversion, ImageIsReadAsPlanes) {
  const Image image =
      make_image(torch::tensor({{{0.0, 1.0}}, {{2.0, -1.0}}, {{0.5, std::numeric_limits<double>::quiet_NaN()}}}));
  EXPECT_EQ(image.width, 2);
  EXPECT_EQ(image.height, 1);
  EXPECT_THAT(image.bytes, ElementsAre(0, 255, 128, 255, 0, 0));
  const Image grey = make_image(torch::tensor({{1, 2, 3}, {4, 5, 6}}, torch::kByte));
  EXPECT_EQ(grey.channels, 1);
  EXPECT_THAT(grey.bytes, ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(TensorConversion, RejectsOtherShapesAsImages) {
  EXPECT_THAT(message_of<base::UsageError>([] { make_image(torch::zeros({2, 8, 8})); }),
              StartsWith("make_image(): the tensor is Float[2, 8, 8]; expected [channels, height, width]"));
  EXPECT_THAT(message_of<base::UsageError>([] { make_image(torch::zeros({8, 8}, torch::kLong)); }),
              StartsWith("make_image(): the tensor is Long[8, 8]"));
  EXPECT_THAT(message_of<base::UsageError>([] { make_image(torch::zeros({3, 0, 8})); }),
              StartsWith("make_image(): the tensor is Float[3, 0, 8]"));
}

}  // namespace
}  // namespace lockstep::training
