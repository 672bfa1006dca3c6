#include "lockstep/ddp/gradient_fingerprint.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::ddp {
namespace {

TEST(GradientWitness, SeesWhatAutogradCountsAndWhatItDoesNot) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf})
    for (const std::int64_t count : {1, 2, 3, 1000}) {
      const at::Tensor gradient = torch::ones({count}, dtype);
      GradientWitness witness;
      EXPECT_TRUE(witness.unchanged(0, gradient)) << "nothing has been noted";
      witness.note(0, gradient);
      EXPECT_TRUE(witness.unchanged(0, gradient));
      gradient.data().mul_(0.5);
      EXPECT_FALSE(witness.unchanged(0, gradient)) << dtype << " " << count;
      witness.note(0, gradient);
      gradient.mul_(1);  // the same values, but written
      EXPECT_FALSE(witness.unchanged(0, gradient));
      witness.forget();
      EXPECT_TRUE(witness.unchanged(0, gradient));
    }
}

TEST(GradientWitness, LooksAtBothEnds) {
  for (const std::int64_t place : {0, 999}) {
    const at::Tensor gradient = torch::ones({1000});
    GradientWitness witness;
    witness.note(3, gradient);
    gradient.data()[place] = 2;
    EXPECT_FALSE(witness.unchanged(3, gradient)) << place;
    EXPECT_TRUE(witness.unchanged(2, gradient));
  }
}

TEST(GradientWitness, AnotherTensorIsAChangeAndNoneIsNot) {
  GradientWitness witness;
  witness.note(0, torch::ones({4}));
  EXPECT_FALSE(witness.unchanged(0, torch::zeros({4})));
  EXPECT_TRUE(witness.unchanged(0, at::Tensor()));
  witness.note(0, at::Tensor());
  EXPECT_TRUE(witness.unchanged(0, torch::ones({4})));
  witness.note(1, torch::empty({0}));
  EXPECT_TRUE(witness.unchanged(1, torch::empty({0})));
  const at::Tensor strided = torch::ones({4, 6}).t();
  witness.note(2, strided);
  strided.data()[5][3] = 0;
  EXPECT_FALSE(witness.unchanged(2, strided));
}

}  // namespace
}  // namespace lockstep::ddp
