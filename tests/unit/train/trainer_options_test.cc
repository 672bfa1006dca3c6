#include "lockstep/train/trainer_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string refused(const std::function<void()>& act) {
  try {
    act();
  } catch (const base::UsageError& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Amount, IsACountOrAShare) {
  EXPECT_EQ(Amount(10).of(100, "x"), 10);
  EXPECT_EQ(Amount(10).of(7, "x"), 7);
  EXPECT_EQ(Amount(1).of(100, "x"), 1);
  EXPECT_EQ(Amount(1.0).of(100, "x"), 100);
  EXPECT_EQ(Amount(0.25).of(103, "x"), 25);
  EXPECT_EQ(Amount(0).of(100, "x"), 0);
  EXPECT_EQ(Amount(0.0).of(100, "x"), 0);
  EXPECT_EQ(Amount(0.1).of(0, "x"), 0);
}

TEST(Amount, RefusesWhatIsNeither) {
  EXPECT_EQ(refused([] { Amount(-1).of(10, "limit"); }),
            "limit is -1; allowed are a count of batches, 0 or more, and a share of them, 0.0 to 1.0");
  EXPECT_THAT(refused([] { Amount(1.5).of(10, "limit"); }), HasSubstr("limit is 1.5; allowed"));
  EXPECT_THAT(refused([] { Amount(2.0).of(10, "limit"); }), HasSubstr("limit is 2.0; allowed"));
  EXPECT_THAT(refused([] { Amount(0.05).of(10, "limit"); }),
              HasSubstr("limit is 0.05, which of 10 batches is less than one"));
}

TEST(TrainerOptions, NothingSetIsAThousandEpochs) {
  EXPECT_EQ(settle({}).max_epochs, 1000);
  EXPECT_EQ(settle({.max_steps = 5}).max_epochs, -1);
  EXPECT_EQ(settle({.max_time = std::chrono::seconds(5)}).max_epochs, -1);
  EXPECT_EQ(settle({.max_epochs = 0}).max_epochs, 0);
}

TEST(TrainerOptions, AFastDevRunIsAFewBatchesOfEach) {
  const TrainerOptions options = settle({.max_epochs = 90, .limit_train_batches = 0.5, .fast_dev_run = 3});
  EXPECT_EQ(options.max_epochs, 1);
  const EpochPlan plan = plan_epoch(options, 100, 50);
  EXPECT_EQ(plan.train_batches, 3);
  EXPECT_EQ(plan.val_batches, 3);
  EXPECT_TRUE(plan.validates_after(0, 2));
}

TEST(TrainerOptions, EachIsRefusedByName) {
  EXPECT_THAT(refused([] { settle({.nodes = 0}); }), HasSubstr("TrainerOptions.nodes is 0; allowed is 1 to 4096"));
  EXPECT_THAT(refused([] { settle({.devices = 0}); }), HasSubstr("TrainerOptions.devices is 0"));
  EXPECT_THAT(refused([] { settle({.devices = {1, 1}}); }),
              HasSubstr("TrainerOptions.devices is {1, 1}; allowed is a list of different"));
  EXPECT_THAT(refused([] { settle({.devices = std::vector<int>{-1}}); }), HasSubstr("TrainerOptions.devices is {-1}"));
  EXPECT_THAT(refused([] { settle({.max_epochs = -2}); }), HasSubstr("TrainerOptions.max_epochs is -2"));
  EXPECT_THAT(refused([] { settle({.max_steps = -7}); }), HasSubstr("TrainerOptions.max_steps is -7"));
  EXPECT_THAT(refused([] { settle({.max_time = std::chrono::seconds(-1)}); }),
              HasSubstr("TrainerOptions.max_time is -1 s"));
  EXPECT_THAT(refused([] { settle({.precision = "int4"}); }), HasSubstr("int4"));
  EXPECT_THAT(refused([] { settle({.accumulate = 0}); }), HasSubstr("TrainerOptions.accumulate is 0"));
  EXPECT_THAT(refused([] { settle({.clip_norm = -1}); }), HasSubstr("TrainerOptions.clip_norm is -1"));
  EXPECT_THAT(refused([] { settle({.clip_value = -1}); }), HasSubstr("TrainerOptions.clip_value is -1"));
  EXPECT_THAT(refused([] { settle({.ema = 1}); }), HasSubstr("TrainerOptions.ema is 1"));
  EXPECT_THAT(refused([] { settle({.check_val_every_n_epoch = 0}); }),
              HasSubstr("TrainerOptions.check_val_every_n_epoch is 0"));
  EXPECT_THAT(refused([] { settle({.num_sanity_val_steps = -1}); }),
              HasSubstr("TrainerOptions.num_sanity_val_steps is -1"));
  EXPECT_THAT(refused([] { settle({.fast_dev_run = -1}); }), HasSubstr("TrainerOptions.fast_dev_run is -1"));
  EXPECT_THAT(refused([] { settle({.log_every_n_steps = 0}); }), HasSubstr("TrainerOptions.log_every_n_steps is 0"));
}

TEST(TrainerOptions, WhatIsKept) {
  EXPECT_EQ(refused([] { settle({.name = "a/b"}); }),
            "TrainerOptions.name is \"a/b\"; allowed is a name of a folder, without / and not beginning with a dot");
  EXPECT_THAT(refused([] { settle({.name = ".."}); }), HasSubstr("TrainerOptions.name is \"..\""));
  EXPECT_THAT(refused([] { settle({.folder = "", .resume = "auto"}); }),
              HasSubstr("TrainerOptions.resume is \"auto\"; allowed is a path"));
  EXPECT_THAT(refused([] { settle({.folder = "", .trace = true}); }), HasSubstr("TrainerOptions.trace"));
  EXPECT_THAT(refused([] { settle({.keep_checkpoints = 1}); }),
              HasSubstr("TrainerOptions.keep_checkpoints is 1; allowed is 2 or more"));
  EXPECT_THAT(refused([] { settle({.save_every_n_steps = -1}); }),
              HasSubstr("TrainerOptions.save_every_n_steps is -1"));
  EXPECT_THAT(refused([] { settle({.save_every_n_epochs = -1}); }),
              HasSubstr("TrainerOptions.save_every_n_epochs is -1"));
  EXPECT_THAT(refused([] { settle({.flops_per_step = 1e9}); }), HasSubstr("both more than 0, or both 0"));
  EXPECT_EQ(settle({.fast_dev_run = 1, .resume = "auto", .trace = true}).folder, "") << "a try writes nothing";
  EXPECT_EQ(settle({.trace = true, .barebones = true}).folder, "");
  EXPECT_EQ(settle({.resume = "runs/x", .barebones = true}).resume, "runs/x");
}

TEST(EpochPlan, TheLastStepOfAnEpochMayHaveFewerBatches) {
  const EpochPlan plan = plan_epoch(settle({.accumulate = 4}), 10, 0);
  EXPECT_EQ(plan.steps, 3);
  std::vector<std::int64_t> sizes, ends;
  for (std::int64_t i = 0; i < 10; ++i) {
    sizes.push_back(plan.batches_of_step(i));
    if (plan.steps_after(i)) ends.push_back(i);
  }
  EXPECT_THAT(sizes, ElementsAre(4, 4, 4, 4, 4, 4, 4, 4, 2, 2));
  EXPECT_THAT(ends, ElementsAre(3, 7, 9));
}

std::vector<std::int64_t> validations(const EpochPlan& plan, std::int64_t epoch) {
  std::vector<std::int64_t> after;
  for (std::int64_t i = 0; i < plan.train_batches; ++i)
    if (plan.validates_after(epoch, i)) after.push_back(i);
  return after;
}

TEST(EpochPlan, ValidatesAtItsEndOrInBetween) {
  EXPECT_THAT(validations(plan_epoch(settle({}), 10, 5), 0), ElementsAre(9));
  EXPECT_THAT(validations(plan_epoch(settle({.val_check_interval = 0.25}), 10, 5), 0), ElementsAre(1, 3, 5, 7, 9));
  EXPECT_THAT(validations(plan_epoch(settle({.val_check_interval = 3}), 10, 5), 0), ElementsAre(2, 5, 8));
  EXPECT_THAT(validations(plan_epoch(settle({.val_check_interval = 0}), 10, 5), 0), ElementsAre());
  EXPECT_THAT(validations(plan_epoch(settle({.limit_val_batches = 0}), 10, 5), 0), ElementsAre());
  EXPECT_THAT(validations(plan_epoch(settle({.check_val_every_n_epoch = 2}), 10, 5), 0), ElementsAre());
  EXPECT_THAT(validations(plan_epoch(settle({.check_val_every_n_epoch = 2}), 10, 5), 1), ElementsAre(9));
}

TEST(EpochPlan, AValidationInTheMiddleOfAStepIsRefused) {
  EXPECT_THAT(refused([] { plan_epoch(settle({.accumulate = 4, .val_check_interval = 6}), 20, 5); }),
              HasSubstr("val_check_interval is 6, every 6 batches, in the middle of a step of 4 (accumulate)"));
  EXPECT_THAT(validations(plan_epoch(settle({.accumulate = 4}), 10, 5), 0), ElementsAre(9));
}

TEST(EpochPlan, OverfittingIsTheSameFewBatches) {
  const EpochPlan plan = plan_epoch(settle({.overfit_batches = 2}), 100, 50);
  EXPECT_EQ(plan.train_batches, 2);
  EXPECT_EQ(plan.val_batches, 2);
}

}  // namespace
}  // namespace lockstep::train
