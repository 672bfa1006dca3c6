#include <gtest/gtest.h>

#include "lockstep/comm/reducers/reducer_base.h"

namespace lockstep::comm::reducers {
namespace {

const StepIdentity kStep{.steps = 3, .batches = 12};

const std::vector<int> kAll = {0, 1, 2};

std::string text_of(const std::vector<ReductionHeader>& headers) {
  const auto difference = find_mismatch(headers, kAll);
  return difference ? difference->text : "";
}

TEST(ReductionHeader, EqualHeadersMatch) {
  const ReductionHeader one = make_header(5, 9, kStep);
  EXPECT_FALSE(find_mismatch({one}, kAll));
  EXPECT_FALSE(find_mismatch({one, one, one}, kAll));
}

TEST(ReductionHeader, EveryFieldHasAMismatchMessage) {
  const ReductionHeader here = make_header(5, 9, kStep);
  const auto against = [&](auto change) {
    StepIdentity step = kStep;
    change(step);
    return text_of({here, here, make_header(5, 9, step)});
  };
  EXPECT_EQ(text_of({here, make_header(6, 9, kStep)}), "rank 0 is in reduction 5, rank 1 is in reduction 6");
  EXPECT_EQ(text_of({here, make_header(5, 8, kStep)}),
            "rank 0 has the bucket layout 9, rank 1 has the bucket layout 8");
  EXPECT_EQ(against([](StepIdentity& s) { s.batches = 1; }), "rank 0 has drawn 12 batches, rank 2 has drawn 1 batch");
  EXPECT_EQ(against([](StepIdentity& s) { s.sample_order_hash = 7; }),
            "the loaders of rank 0 and rank 2 have different seeds, epochs, batch sizes or datasets");
  EXPECT_EQ(against([](StepIdentity& s) { s.sample_order_hash = 7, s.sample_order_parts = 0x302; }),
            "the loaders of rank 0 and rank 2 have different seeds, batch sizes");
  EXPECT_EQ(against([](StepIdentity& s) { s.steps = 4; }),
            "rank 0 has completed 3 steps, rank 2 has completed 4 steps");
  EXPECT_EQ(against([](StepIdentity& s) { s.optimizer_steps = 1; }),
            "rank 0 has made 0 optimizer steps, rank 2 has made 1 optimizer step");
  EXPECT_EQ(against([](StepIdentity& s) { s.local_backwards = 1; }),
            "rank 0 has called backward() 0 times, rank 2 has called backward() 1 time");
  EXPECT_EQ(against([](StepIdentity& s) { s.failed_backwards = 1; }),
            "rank 0 has had 0 backward() calls fail, rank 2 has had 1 backward() call fail");
  EXPECT_EQ(against([](StepIdentity& s) { s.accumulating = true; }),
            "rank 0 has fresh gradients, rank 2 accumulates into existing gradients");
  EXPECT_EQ(against([](StepIdentity& s) { s.divide_by_active = true; }), "");
  EXPECT_EQ(against([](StepIdentity& s) { s.use = GradientUse::kNorm; }),
            "rank 0 averages gradients, rank 2 computes the norm of gradients");
  EXPECT_EQ(against([](StepIdentity& s) { s.use = GradientUse::kUpdate; }),
            "rank 0 averages gradients, rank 2 updates parameters");
  EXPECT_EQ(against([](StepIdentity& s) { s.use = GradientUse::kUpdateInBackward; }),
            "rank 0 averages gradients, rank 2 updates parameters in backward()");
  EXPECT_EQ(against([](StepIdentity& s) { s.already_averaged = true; }),
            "rank 0 has local gradients, rank 2 has averaged gradients");
  EXPECT_EQ(against([](StepIdentity& s) { s.options_hash = 7; }),
            "the optimizers of rank 0 and rank 2 have different options, such as the learning rate, or have made "
            "different numbers of steps");
}

TEST(ReductionHeader, MismatchNamesWorldRanks) {
  const auto difference = find_mismatch({make_header(5, 9, kStep), make_header(6, 9, kStep)}, {2, 5});
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->text, "rank 2 is in reduction 5, rank 5 is in reduction 6");
  EXPECT_EQ(difference->rank, 5);
  EXPECT_EQ(difference->other, 2);
}

TEST(ReductionHeader, JoinedRanksMatchEveryStep) {
  StepIdentity over{.steps = 99, .batches = 1, .joined = true};
  const ReductionHeader here = make_header(5, 9, kStep);
  EXPECT_EQ(text_of({make_header(5, 9, over), here, here}), "");
  EXPECT_NE(text_of({make_header(4, 9, over), here, here}), "") << "a joined rank must be in the same reduction";
  StepIdentity later = kStep;
  later.batches = 13;
  const auto difference = find_mismatch({make_header(5, 9, over), here, make_header(5, 9, later)}, kAll);
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->other, 1);
  EXPECT_EQ(difference->rank, 2);
}

}  // namespace
}  // namespace lockstep::comm::reducers
