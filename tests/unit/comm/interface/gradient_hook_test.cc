#include "lockstep/comm/interface/gradient_hook.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

TEST(Bucket, GradientIsAViewWithShapeAndStrides) {
  const Bucket bucket{.names = {"w", "transposed"},
                      .shapes = {{2, 3}, {2, 3}},
                      .strides = {{3, 1}, {1, 2}},
                      .offsets = {0, 64},
                      .buffer = at::arange(128, at::kFloat)};
  EXPECT_TRUE(bucket.gradient(0).equal(at::arange(6, at::kFloat).view({2, 3})));
  EXPECT_TRUE(bucket.gradient(1).equal(at::arange(64, 70, at::kFloat).view({3, 2}).t()));
  bucket.gradient(1).zero_();
  EXPECT_EQ(bucket.buffer.narrow(0, 64, 7).sum().item<float>(), 70);
}

}  // namespace
}  // namespace lockstep::comm
