#include "lockstep/launch/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace lockstep::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

RunOptions options(int ranks) {
  RunOptions run;
  run.ranks = ranks;
  run.command = {"train", "--lr", "0.1"};
  return run;
}

Surroundings surroundings() {
  Surroundings s;
  s.environment = {"HOME=/root", "EMPTY=", "ODD=a=b\nc"};
  s.cpus = {{0, 0, 0}, {1, 1, 0}, {2, 2, 0}, {3, 3, 0}};
  s.program = "/bin/train";
  s.store = "127.0.0.1:4711";
  s.job = "abc";
  s.master_port = 2222;
  return s;
}

TEST(Plan, AllRanksShareTheJobAndWhatTorchrunSets) {
  const JobPlan job = plan_job(options(2), surroundings());
  EXPECT_EQ(job.program, "/bin/train");
  EXPECT_THAT(job.arguments, ElementsAre("train", "--lr", "0.1"));
  for (const char* variable :
       {"LOCKSTEP_WORLD_SIZE=2", "LOCKSTEP_LOCAL_WORLD_SIZE=2", "LOCKSTEP_NODE_RANK=0", "LOCKSTEP_NUM_NODES=1", "LOCKSTEP_STORE=127.0.0.1:4711",
        "LOCKSTEP_JOB=abc", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "GROUP_RANK=0", "NODE_RANK=0", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=2222",
        "HOME=/root", "EMPTY=", "ODD=a=b\nc"})
    EXPECT_THAT(job.environment, Contains(variable));
}

TEST(Plan, EachRankHasItsNumbersCoresAndThreads) {
  const JobPlan job = plan_job(options(2), surroundings());
  ASSERT_EQ(job.ranks.size(), 2u);
  EXPECT_EQ(job.ranks[1].rank, 1);
  for (const char* variable : {"LOCKSTEP_RANK=1", "LOCKSTEP_LOCAL_RANK=1", "RANK=1", "LOCAL_RANK=1", "OMP_NUM_THREADS=2"})
    EXPECT_THAT(job.ranks[1].environment, Contains(variable));
  EXPECT_THAT(job.ranks[1].cpus, ElementsAre(2, 3));
  EXPECT_THAT(job.ranks[1].arguments, IsEmpty());
}

TEST(Plan, NoVariableTwiceWhateverWasInherited) {
  Surroundings s = surroundings();
  for (const char* variable : {"RANK=9", "LOCKSTEP_RANK=9", "MASTER_PORT=1", "OMP_NUM_THREADS=", "LOCKSTEP_STORE=x"}) s.environment.push_back(variable);
  RunOptions run = options(3);
  run.transport = "gloo";
  run.hang_timeout = std::chrono::milliseconds(7500);
  run.join_timeout = "2.5";
  const JobPlan job = plan_job(run, s);
  for (const RankPlan& rank : job.ranks) {
    std::vector<std::string> names;
    for (const Environment* part : {&job.environment, &rank.environment})
      for (const std::string& variable : *part) names.push_back(variable.substr(0, variable.find('=')));
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  }
  EXPECT_THAT(job.environment, Contains("LOCKSTEP_TRANSPORT=gloo"));
  EXPECT_THAT(job.environment, Contains("LOCKSTEP_TIMEOUT=17.5"));
  EXPECT_THAT(job.environment, Contains("LOCKSTEP_JOIN_TIMEOUT=2.5"));
}

TEST(Plan, RanksWaitLongerThanTheLauncher) {
  Surroundings s = surroundings();
  EXPECT_THAT(plan_job(options(2), s).environment, Contains("LOCKSTEP_TIMEOUT=310"));
  s.environment.push_back("LOCKSTEP_TIMEOUT=5");  // a user's
  EXPECT_THAT(plan_job(options(2), s).environment, Contains("LOCKSTEP_TIMEOUT=5"));
  RunOptions run = options(2);
  run.hang_timeout = std::chrono::milliseconds(0);
  EXPECT_THAT(plan_job(run, s).environment, Contains("LOCKSTEP_TIMEOUT=0"));
  EXPECT_EQ(pulse_limits(run, {}).stall.count(), 0);  // a debugger stops processes as well
  run.stall_timeout = std::chrono::milliseconds(9000);
  EXPECT_EQ(pulse_limits(run, {}).stall.count(), 9000);
  EXPECT_EQ(pulse_limits(options(2), {}).stall.count(), 30000);
  EXPECT_EQ(pulse_limits(options(2), {"LOCKSTEP_TIMEOUT=7200"}).hang, std::chrono::hours(2));
  EXPECT_EQ(pulse_limits(options(2), {"LOCKSTEP_TIMEOUT=0"}).stall.count(), 0);
}

TEST(Plan, WhatAnotherLauncherSaidIsTakenOut) {
  Surroundings s = surroundings();
  s.environment = {"TORCHELASTIC_RUN_ID=none", "TORCHELASTIC_USE_AGENT_STORE=True", "ROLE_RANK=3", "SLURM_PROCID=0", "SLURM_JOB_ID=5", "PMI_RANK=0",
                   "LOCKSTEP_TERMINAL=80", "LOCKSTEP_PAGE=5"};
  const JobPlan job = plan_job(options(1), s);
  for (const char* name : {"TORCHELASTIC_", "ROLE_RANK", "SLURM_PROCID", "PMI_", "LOCKSTEP_TERMINAL", "LOCKSTEP_PAGE"})
    EXPECT_THAT(job.environment, Not(Contains(StartsWith(name)))) << name;
  EXPECT_THAT(job.environment, Contains("SLURM_JOB_ID=5"));
}

TEST(Plan, AUsersChoiceOfThreadsStays) {
  Surroundings s = surroundings();
  s.environment.push_back("OMP_NUM_THREADS=5");
  const JobPlan job = plan_job(options(2), s);
  EXPECT_THAT(job.environment, Contains("OMP_NUM_THREADS=5"));
  EXPECT_THAT(job.ranks[0].environment, Not(Contains(StartsWith("OMP_NUM_THREADS"))));
}

TEST(Plan, MoreRanksThanCoresHaveOneThreadEach) {
  const JobPlan job = plan_job(options(6), surroundings());
  EXPECT_THAT(job.ranks[5].environment, Contains("OMP_NUM_THREADS=1"));
}

TEST(Plan, UnboundRanksStillDivideTheThreads) {
  RunOptions run = options(2);
  run.bind = false;
  const JobPlan job = plan_job(run, surroundings());
  EXPECT_THAT(job.ranks[0].cpus, IsEmpty());
  EXPECT_THAT(job.ranks[0].environment, Contains("OMP_NUM_THREADS=2"));
}

TEST(Plan, LocalRankIsTheLastArgument) {
  RunOptions run = options(2);
  run.local_rank_argument = "local_rank";
  EXPECT_THAT(plan_job(run, surroundings()).ranks[1].arguments, ElementsAre("--local_rank=1"));
}

TEST(Plan, ThePrefixTakesItsColumnsFromTheTerminal) {
  Surroundings s = surroundings();
  s.columns = 80;
  EXPECT_THAT(plan_job(options(2), s).environment, Contains("LOCKSTEP_TERMINAL=76"));
  EXPECT_THAT(plan_job(options(11), s).environment, Contains("LOCKSTEP_TERMINAL=75"));
}

TEST(Plan, DefaultRanks) {
  EXPECT_EQ(default_ranks({}, 0, 6), 6);
  EXPECT_EQ(default_ranks({}, 4, 6), 4);
  EXPECT_EQ(default_ranks({"CUDA_VISIBLE_DEVICES=0,3"}, 4, 6), 2);
  EXPECT_EQ(default_ranks({"CUDA_VISIBLE_DEVICES=0,-1,3"}, 4, 6), 1);
  EXPECT_EQ(default_ranks({"CUDA_VISIBLE_DEVICES="}, 4, 6), 6);
  EXPECT_EQ(default_ranks({"CUDA_VISIBLE_DEVICES=0,1"}, 0, 6), 6);
  EXPECT_EQ(default_ranks({}, 0, 0), 1);
}

}  // namespace
}  // namespace lockstep::launcher
