// Every operation of a group against a reference that each rank computes by itself.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/rank_main.h"

namespace lockstep::tests {
namespace {

TEST(Collectives, Sum) {
  at::Tensor one = at::ones({3});
  world().all_reduce(one);
  EXPECT_TRUE(at::equal(one, at::full({3}, static_cast<double>(world().size()), at::kFloat)));
}

}  // namespace
}  // namespace lockstep::tests
