// Tests which changes of gradients are detected.
#include "lockstep/ddp/gradient_fingerprint.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::ddp {
namespace {

TEST(GradientFingerprint, DetectsChangesWithAndWithoutVersionBump) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf})
    for (const std::int64_t count : {1, 2, 3, 1000}) {
      const at::Tensor gradient = torch::ones({count}, dtype);
      GradientFingerprint fingerprint;
      EXPECT_TRUE(fingerprint.is_unchanged(0, gradient)) << "nothing has been recorded";
      fingerprint.record(0, gradient);
      EXPECT_TRUE(fingerprint.is_unchanged(0, gradient));
      gradient.data().mul_(0.5);
      EXPECT_FALSE(fingerprint.is_unchanged(0, gradient)) << dtype << " " << count;
      fingerprint.record(0, gradient);
      gradient.mul_(1);  // a write that keeps the values
      EXPECT_FALSE(fingerprint.is_unchanged(0, gradient));
      fingerprint.clear();
      EXPECT_TRUE(fingerprint.is_unchanged(0, gradient));
    }
}

TEST(GradientFingerprint, ComparesFirstAndLastElements) {
  for (const std::int64_t place : {0, 999}) {
    const at::Tensor gradient = torch::ones({1000});
    GradientFingerprint fingerprint;
    fingerprint.record(3, gradient);
    gradient.data()[place] = 2;
    EXPECT_FALSE(fingerprint.is_unchanged(3, gradient)) << place;
    EXPECT_TRUE(fingerprint.is_unchanged(2, gradient));
  }
}

TEST(GradientFingerprint, DetectsReplacedTensorButNotUndefined) {
  GradientFingerprint fingerprint;
  fingerprint.record(0, torch::ones({4}));
  EXPECT_FALSE(fingerprint.is_unchanged(0, torch::zeros({4})));
  EXPECT_TRUE(fingerprint.is_unchanged(0, at::Tensor()));
  fingerprint.record(0, at::Tensor());
  EXPECT_TRUE(fingerprint.is_unchanged(0, torch::ones({4})));
  fingerprint.record(1, torch::empty({0}));
  EXPECT_TRUE(fingerprint.is_unchanged(1, torch::empty({0})));
  const at::Tensor strided = torch::ones({4, 6}).t();
  fingerprint.record(2, strided);
  strided.data()[5][3] = 0;
  EXPECT_FALSE(fingerprint.is_unchanged(2, strided));
}

}  // namespace
}  // namespace lockstep::ddp
