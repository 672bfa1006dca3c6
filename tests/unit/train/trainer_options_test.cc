#include "lockstep/train/trainer_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::training {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string usage_error_of(const std::function<void()>& function) {
  return tests::message_of<base::UsageError>(function);
}

TEST(CountOrFraction, ResolvesCountsAndFractions) {
  EXPECT_EQ(CountOrFraction(10).resolve(100, "x"), 10);
  EXPECT_EQ(CountOrFraction(10).resolve(7, "x"), 7);
  EXPECT_EQ(CountOrFraction(1).resolve(100, "x"), 1);
  EXPECT_EQ(CountOrFraction(1.0).resolve(100, "x"), 100);
  EXPECT_EQ(CountOrFraction(0.25).resolve(103, "x"), 25);
  EXPECT_EQ(CountOrFraction(0).resolve(100, "x"), 0);
  EXPECT_EQ(CountOrFraction(0.0).resolve(100, "x"), 0);
  EXPECT_EQ(CountOrFraction(0.1).resolve(0, "x"), 0);
}

TEST(CountOrFraction, RejectsInvalidCountsAndFractions) {
  EXPECT_EQ(usage_error_of([] { CountOrFraction(-1).resolve(10, "limit"); }),
            "limit is -1; expected a count of batches, 0 or more, or a fraction of them, 0.0 to 1.0");
  EXPECT_THAT(usage_error_of([] { CountOrFraction(1.5).resolve(10, "limit"); }), HasSubstr("limit is 1.5; expected"));
  EXPECT_THAT(usage_error_of([] { CountOrFraction(2.0).resolve(10, "limit"); }), HasSubstr("limit is 2.0; expected"));
  EXPECT_THAT(usage_error_of([] { CountOrFraction(0.05).resolve(10, "limit"); }),
              HasSubstr("limit is 0.05, which is less than one of 10 batches"));
}

TEST(TrainerOptions, DefaultsToAThousandEpochs) {
  EXPECT_EQ(resolve_options({}).max_epochs, 1000);
  EXPECT_EQ(resolve_options({.max_steps = 5}).max_epochs, -1);
  EXPECT_EQ(resolve_options({.max_time = std::chrono::seconds(5)}).max_epochs, -1);
  EXPECT_EQ(resolve_options({.max_epochs = 0}).max_epochs, 0);
}

TEST(TrainerOptions, FastDevRunLimitsBatches) {
  const TrainerOptions options = resolve_options({.max_epochs = 90, .limit_train_batches = 0.5, .fast_dev_run = 3});
  EXPECT_EQ(options.max_epochs, 1);
  const EpochPlan plan = plan_epoch(options, 100, 50);
  EXPECT_EQ(plan.train_batches, 3);
  EXPECT_EQ(plan.val_batches, 3);
  EXPECT_TRUE(plan.should_validate_after(0, 2));
}

TEST(TrainerOptions, ErrorsNameTheOption) {
  EXPECT_THAT(usage_error_of([] { resolve_options({.nodes = 0}); }),
              HasSubstr("TrainerOptions.nodes is 0; expected 1 to 4096"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.devices = 0}); }), HasSubstr("TrainerOptions.devices is 0"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.devices = {1, 1}}); }),
              HasSubstr("TrainerOptions.devices is {1, 1}; expected a list of distinct GPU"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.devices = std::vector<int>{-1}}); }),
              HasSubstr("TrainerOptions.devices is {-1}"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.max_epochs = -2}); }),
              HasSubstr("TrainerOptions.max_epochs is -2"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.max_steps = -7}); }), HasSubstr("TrainerOptions.max_steps is -7"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.max_time = std::chrono::seconds(-1)}); }),
              HasSubstr("TrainerOptions.max_time is -1 s"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.precision = "int4"}); }), HasSubstr("int4"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.accumulate_grad_batches = 0}); }),
              HasSubstr("TrainerOptions.accumulate_grad_batches is 0"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.clip_norm = -1}); }), HasSubstr("TrainerOptions.clip_norm is -1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.clip_value = -1}); }),
              HasSubstr("TrainerOptions.clip_value is -1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.ema = 1}); }), HasSubstr("TrainerOptions.ema is 1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.check_val_every_n_epoch = 0}); }),
              HasSubstr("TrainerOptions.check_val_every_n_epoch is 0"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.num_sanity_val_steps = -1}); }),
              HasSubstr("TrainerOptions.num_sanity_val_steps is -1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.fast_dev_run = -1}); }),
              HasSubstr("TrainerOptions.fast_dev_run is -1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.log_every_n_steps = 0}); }),
              HasSubstr("TrainerOptions.log_every_n_steps is 0"));
}

TEST(TrainerOptions, OutputOptions) {
  EXPECT_EQ(usage_error_of([] { resolve_options({.name = "a/b"}); }),
            "TrainerOptions.name is \"a/b\"; expected a directory name without / that does not begin with a dot");
  EXPECT_THAT(usage_error_of([] { resolve_options({.name = ".."}); }), HasSubstr("TrainerOptions.name is \"..\""));
  EXPECT_THAT(usage_error_of([] { resolve_options({.folder = "", .resume = "auto"}); }),
              HasSubstr("TrainerOptions.resume is \"auto\"; expected a path"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.folder = "", .trace = true}); }),
              HasSubstr("TrainerOptions.trace"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.keep_checkpoints = 1}); }),
              HasSubstr("TrainerOptions.keep_checkpoints is 1; expected 2 or more"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.save_every_n_steps = -1}); }),
              HasSubstr("TrainerOptions.save_every_n_steps is -1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.save_every_n_epochs = -1}); }),
              HasSubstr("TrainerOptions.save_every_n_epochs is -1"));
  EXPECT_THAT(usage_error_of([] { resolve_options({.flops_per_step = 1e9}); }), HasSubstr("both above 0, or both 0"));
  EXPECT_EQ(resolve_options({.fast_dev_run = 1, .resume = "auto", .trace = true}).folder, "")
      << "a fast_dev_run writes nothing";
  EXPECT_EQ(resolve_options({.trace = true, .barebones = true}).folder, "");
  EXPECT_EQ(resolve_options({.resume = "runs/x", .barebones = true}).resume, "runs/x");
}

TEST(EpochPlan, LastStepOfAnEpochMayHaveFewerBatches) {
  const EpochPlan plan = plan_epoch(resolve_options({.accumulate_grad_batches = 4}), 10, 0);
  EXPECT_EQ(plan.steps, 3);
  std::vector<std::int64_t> sizes, ends;
  for (std::int64_t i = 0; i < 10; ++i) {
    sizes.push_back(plan.batches_in_step(i));
    if (plan.is_step_end(i)) ends.push_back(i);
  }
  EXPECT_THAT(sizes, ElementsAre(4, 4, 4, 4, 4, 4, 4, 4, 2, 2));
  EXPECT_THAT(ends, ElementsAre(3, 7, 9));
}

std::vector<std::int64_t> validations(const EpochPlan& plan, std::int64_t epoch) {
  std::vector<std::int64_t> after;
  for (std::int64_t i = 0; i < plan.train_batches; ++i)
    if (plan.should_validate_after(epoch, i)) after.push_back(i);
  return after;
}

TEST(EpochPlan, ValidatesAtTheEndOrInBetween) {
  EXPECT_THAT(validations(plan_epoch(resolve_options({}), 10, 5), 0), ElementsAre(9));
  EXPECT_THAT(validations(plan_epoch(resolve_options({.val_check_interval = 0.25}), 10, 5), 0),
              ElementsAre(1, 3, 5, 7, 9));
  EXPECT_THAT(validations(plan_epoch(resolve_options({.val_check_interval = 3}), 10, 5), 0), ElementsAre(2, 5, 8));
  EXPECT_THAT(validations(plan_epoch(resolve_options({.val_check_interval = 0}), 10, 5), 0), ElementsAre());
  EXPECT_THAT(validations(plan_epoch(resolve_options({.limit_val_batches = 0}), 10, 5), 0), ElementsAre());
  EXPECT_THAT(validations(plan_epoch(resolve_options({.check_val_every_n_epoch = 2}), 10, 5), 0), ElementsAre());
  EXPECT_THAT(validations(plan_epoch(resolve_options({.check_val_every_n_epoch = 2}), 10, 5), 1), ElementsAre(9));
}

TEST(EpochPlan, RejectsAValidationInsideAStep) {
  EXPECT_THAT(usage_error_of(
                  [] { plan_epoch(resolve_options({.accumulate_grad_batches = 4, .val_check_interval = 6}), 20, 5); }),
              HasSubstr("val_check_interval is 6 (every 6 batches), which ends inside a step of 4 batches"));
  EXPECT_THAT(validations(plan_epoch(resolve_options({.accumulate_grad_batches = 4}), 10, 5), 0), ElementsAre(9));
}

TEST(EpochPlan, OverfitBatchesLimitsBatches) {
  const EpochPlan plan = plan_epoch(resolve_options({.overfit_batches = 2}), 100, 50);
  EXPECT_EQ(plan.train_batches, 2);
  EXPECT_EQ(plan.val_batches, 2);
}

}  // namespace
}  // namespace lockstep::training
