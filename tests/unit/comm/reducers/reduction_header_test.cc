#include "lockstep/comm/reducers/reduction_header.h"

#include <gtest/gtest.h>

namespace lockstep::comm {
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
  EXPECT_EQ(text_of({here, make_header(6, 9, kStep)}), "rank 0 is in exchange 5, rank 1 is in exchange 6");
  EXPECT_EQ(text_of({here, make_header(5, 8, kStep)}),
            "rank 0 has laid out its buckets in another way (9), rank 1 has laid out its buckets in another way (8)");
  EXPECT_EQ(against([](StepIdentity& s) { s.batches = 1; }), "rank 0 has drawn 12 batches, rank 2 has drawn 1 batch");
  EXPECT_EQ(against([](StepIdentity& s) { s.order = 7; }),
            "rank 0 has drawn its samples in an order (seed, epoch, shuffle, size of the dataset) with the fingerprint "
            "0, rank 2 has drawn its samples in an "
            "order (seed, epoch, shuffle, size of the dataset) with the fingerprint 7");
  EXPECT_EQ(against([](StepIdentity& s) { s.steps = 4; }), "rank 0 has ended 3 steps, rank 2 has ended 4 steps");
  EXPECT_EQ(
      against([](StepIdentity& s) { s.empty_backwards = 1; }),
      "rank 0 has called backward() 0 times without reaching a parameter, rank 2 has called backward() 1 time without "
      "reaching a parameter");
  EXPECT_EQ(against([](StepIdentity& s) { s.accumulating = true; }),
            "rank 0 has fresh gradients, rank 2 adds to gradients that were there");
  EXPECT_EQ(against([](StepIdentity& s) { s.divide_by_active = true; }), "");
  EXPECT_EQ(against([](StepIdentity& s) { s.use = GradientUse::kNorm; }),
            "rank 0 averages gradients, rank 2 takes the norm of gradients");
  EXPECT_EQ(against([](StepIdentity& s) { s.use = GradientUse::kUpdate; }),
            "rank 0 averages gradients, rank 2 updates parameters");
  EXPECT_EQ(against([](StepIdentity& s) { s.use = GradientUse::kUpdateInBackward; }),
            "rank 0 averages gradients, rank 2 updates parameters in backward()");
  EXPECT_EQ(against([](StepIdentity& s) { s.already_averaged = true; }),
            "rank 0 has gradients of its own, rank 2 has averaged gradients");
  EXPECT_EQ(against([](StepIdentity& s) { s.options = 7; }),
            "rank 0 has an optimizer whose options or steps have the fingerprint 0, rank 2 has an optimizer whose "
            "options or steps have the "
            "fingerprint 7");
}

TEST(ReductionHeader, MismatchNamesWorldRanks) {
  const auto difference = find_mismatch({make_header(5, 9, kStep), make_header(6, 9, kStep)}, {2, 5});
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->text, "rank 2 is in exchange 5, rank 5 is in exchange 6");
  EXPECT_EQ(difference->rank, 5);
  EXPECT_EQ(difference->other, 2);
}

TEST(ReductionHeader, JoinedRanksMatchEveryStep) {
  StepIdentity over{.steps = 99, .batches = 1, .joined = true};
  const ReductionHeader here = make_header(5, 9, kStep);
  EXPECT_EQ(text_of({make_header(5, 9, over), here, here}), "");
  EXPECT_NE(text_of({make_header(4, 9, over), here, here}), "") << "but in the same exchange";
  StepIdentity later = kStep;
  later.batches = 13;
  const auto difference = find_mismatch({make_header(5, 9, over), here, make_header(5, 9, later)}, kAll);
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->other, 1);
  EXPECT_EQ(difference->rank, 2);
}

}  // namespace
}  // namespace lockstep::comm
