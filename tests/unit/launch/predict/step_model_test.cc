#include "lockstep/launch/predict/step_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep::launcher::predict {
namespace {

using ::testing::HasSubstr;

constexpr double kRate = 1e7;      // bytes per second
constexpr double kFixed = 2.5e-3;  // more than what messages of any case here take

/// A step of 0.3 s; `megabytes` of gradients, which are ready that long before the end of backward().
HostProfile profile_of(const std::vector<std::pair<double, double>>& megabytes_and_leads) {
  HostProfile profile{.ranks = 2, .steps_s = {0.3, 0.3, 0.3, 0.3, 0.3, 0.3}};
  auto& model = profile.models.emplace_back();
  for (const auto& [megabytes, lead_s] : megabytes_and_leads)
    model.gradients.push_back({.bytes = megabytes * 1e6, .rows = 1000, .columns = megabytes * 250, .lead_s = lead_s});
  return profile;
}

Prediction predict(const HostProfile& profile, int hosts, Method method, const HostCosts& costs = {0, 0, false},
                   int every = 30) {
  return predict_step(profile, costs, {.hosts = hosts, .bytes_per_s = kRate, .latency_s = 50e-6}, method, every);
}

TEST(StepModel, GradientsThatAreReadyAtTheEndAddTheTimeOfTheirBytes) {
  const HostProfile profile = profile_of({{40, 0}});
  EXPECT_NEAR(predict(profile, 2, Method::kFloat32).step_s, 0.3 + 4, kFixed);   // each byte once
  EXPECT_NEAR(predict(profile, 4, Method::kFloat32).step_s, 0.3 + 6, kFixed);   // 2 (n - 1) / n
  EXPECT_NEAR(predict(profile, 2, Method::kBfloat16).step_s, 0.3 + 2, kFixed);  // half of the bytes
  EXPECT_NEAR(predict(profile, 2, Method::kInt8).step_s, 0.3 + 4 * 260.0 / 1024, kFixed);
  EXPECT_DOUBLE_EQ(predict(profile, 2, Method::kFloat32).bytes, 40e6);
}

TEST(StepModel, OneHostTakesItsOwnTime) {
  const Prediction one = predict(profile_of({{40, 0}}), 1, Method::kFloat32);
  EXPECT_NEAR(one.step_s, 0.3, 1e-12);
  EXPECT_NEAR(one.low_s, 0.3, 1e-12);
  EXPECT_NEAR(one.high_s, 0.3, 1e-12);
  EXPECT_DOUBLE_EQ(one.bytes, 0);
}

TEST(StepModel, WhatIsReadyEarlierOverlapsWithBackward) {
  // 1 MB takes 0.1 s and is ready 0.2 s before the end.
  EXPECT_NEAR(predict(profile_of({{1.1, 0.2}}), 2, Method::kFloat32).step_s, 0.3, kFixed);
  // 30 MB from 0.2 s before the end on: 2.8 s are left then; 10 MB more, ready at the end, wait for the first bucket.
  EXPECT_NEAR(predict(profile_of({{30, 0.2}, {10, 0}}), 2, Method::kFloat32).step_s, 0.3 + 2.8 + 1, 2 * kFixed);
  // A second bucket is sent when its last gradient is ready, not before.
  EXPECT_NEAR(predict(profile_of({{1.1, 0.2}, {10, 0.2}, {16, 0.05}}), 2, Method::kFloat32).step_s, 0.3 + 2.6 - 0.05,
              2 * kFixed);
}

TEST(StepModel, RoundsAreSharedByTheirSteps) {
  const HostProfile profile = profile_of({{40, 0}});
  EXPECT_NEAR(predict(profile, 2, Method::kAverage).step_s, 0.3 + 4.0 / 30, kFixed);
  EXPECT_NEAR(predict(profile, 2, Method::kAverage, {0, 0, false}, 100).step_s, 0.3 + 4.0 / 100, kFixed);
  EXPECT_NEAR(predict(profile, 2, Method::kDiLoCo).bytes, 10e6 * 260 / 256 / 30, 1);
  EXPECT_NEAR(predict(profile, 4, Method::kSparseLoCo).bytes, 3 * 10e6 * 116 / 4096 / 30, 1);  // an all-gather
  EXPECT_LT(predict(profile, 2, Method::kSparseLoCo).step_s, predict(profile, 2, Method::kDiLoCo).step_s);
}

TEST(StepModel, WithoutAFreeCoreTheExchangeTakesTheTimeOfTheRanks) {
  const HostProfile profile = profile_of({{1.1, 0.2}});
  const HostCosts costs{.wire_s_per_byte = 50e-9, .memory_s_per_byte = 0, .shares_cores = true};
  EXPECT_NEAR(predict(profile, 2, Method::kFloat32, costs).step_s, 0.3 + 1.1e6 * 50e-9 / 2, kFixed);
  EXPECT_NEAR(predict(profile, 2, Method::kFloat32, {50e-9, 0, false}).step_s, 0.3, kFixed);
}

TEST(StepModel, EveryStepOfSeveralHostsWaitsForTheSlowest) {
  HostProfile profile = profile_of({{0.001, 0.1}});
  profile.steps_s = {0.2, 0.4, 0.2, 0.4, 0.2, 0.4, 0.2, 0.4, 0.2, 0.4, 0.2, 0.4};
  const double two = predict(profile, 2, Method::kFloat32).step_s, eight = predict(profile, 8, Method::kFloat32).step_s;
  EXPECT_NEAR(two, 0.35, 0.02);  // in three of four draws of two, one is 0.4
  EXPECT_NEAR(eight, 0.4, 0.01);
  EXPECT_LT(predict(profile, 8, Method::kDiLoCo).step_s, 0.35);  // a round waits for the slowest sum of 30
}

TEST(StepModel, SeveralModelsAndPassesAddUp) {
  HostProfile profile = profile_of({{10, 0}});
  profile.models.push_back(profile.models.front());
  profile.models.back().passes_per_step = 5;
  EXPECT_DOUBLE_EQ(gradient_bytes(profile), 60e6);
  EXPECT_NEAR(predict(profile, 2, Method::kFloat32).step_s, 0.3 + 6, 6 * kFixed);
}

TEST(StepModel, IntervalsHoldTheMeanAndGrowBeyondTheComparedHosts) {
  const HostProfile profile = profile_of({{40, 0}});
  const auto width = [&](int hosts) {
    const Prediction one = predict(profile, hosts, Method::kFloat32);
    EXPECT_LE(one.low_s, one.step_s);
    EXPECT_GE(one.high_s, one.step_s);
    return (one.high_s - one.low_s) / one.step_s;
  };
  EXPECT_LT(width(4), width(128));
  EXPECT_DOUBLE_EQ(predict(profile, 4, Method::kFloat32).step_s, predict(profile, 4, Method::kFloat32).step_s);
}

constexpr const char* kRank0 = R"({"world_size":2,"steps_s":[0.1,0.3],"models":[{"passes_per_step":1,"gradients":[
    {"bytes":8,"rows":1,"columns":2,"is_float32":true,"count":9,"lead_s":0.01},
    {"bytes":4,"rows":1,"columns":1,"is_float32":true,"count":9,"lead_s":0.05}]}]})";
constexpr const char* kRank1 = R"({"world_size":2,"steps_s":[0.2,0.2],"models":[{"passes_per_step":1,"gradients":[
    {"bytes":8,"rows":1,"columns":2,"is_float32":true,"count":9,"lead_s":0.02},
    {"bytes":4,"rows":1,"columns":1,"is_float32":true,"count":9,"lead_s":0.04}]}]})";

TEST(HostProfile, TheSlowestRankDecides) {
  const HostProfile profile = parse_profiles({kRank0, kRank1});
  EXPECT_EQ(profile.ranks, 2);
  EXPECT_THAT(profile.steps_s, ::testing::ElementsAre(0.2, 0.3));
  ASSERT_EQ(profile.models.size(), 1u);
  const auto& gradients = profile.models.front().gradients;
  ASSERT_EQ(gradients.size(), 2u);
  EXPECT_DOUBLE_EQ(gradients[0].lead_s, 0.04);  // in the order in which they are ready
  EXPECT_DOUBLE_EQ(gradients[1].lead_s, 0.01);
}

TEST(HostProfile, AGradientThatOneRankDoesNotHaveCountsForTheOthers) {
  std::string other = kRank1;
  other.replace(other.find("\"count\":9"), 9, "\"count\":0");  // of the first gradient
  const auto gradients = parse_profiles({kRank0, other}).models.front().gradients;
  ASSERT_EQ(gradients.size(), 2u);
  EXPECT_DOUBLE_EQ(gradients[1].lead_s, 0.01);  // of rank 0
}

TEST(StepModel, OtherTypesThanFloat32AreNotRounded) {
  HostProfile profile = profile_of({{40, 0}});
  profile.models.front().gradients.front().is_float32 = false;
  EXPECT_NEAR(predict(profile, 2, Method::kBfloat16).step_s, 0.3 + 4, kFixed);
}

TEST(HostProfile, OtherTextsAreRefused) {
  for (const char* text : {"", "{", "[]", "{}", R"({"world_size":2,"steps_s":[-1],"models":[]})",
                           R"({"world_size":2,"steps_s":["a"],"models":[]})"})
    EXPECT_THROW(parse_profiles({text}), base::FormatError) << text;
}

TEST(HostProfile, CostsOfThisHostAreMeasured) {
  const HostCosts costs = measure_host_costs();
  EXPECT_GT(costs.memory_s_per_byte, 1e-12);  // a terabyte per second
  EXPECT_LT(costs.memory_s_per_byte, 1e-8);   // 100 MB per second
  EXPECT_GT(costs.wire_s_per_byte, costs.memory_s_per_byte / 10);
  EXPECT_LT(costs.wire_s_per_byte, 1e-7);
}

}  // namespace
}  // namespace lockstep::launcher::predict
