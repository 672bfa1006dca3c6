#include "lockstep/job/identity/pod.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/job/identity/identity.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/job/identity/variables.h"

namespace lockstep::job::identity {
namespace {

using base::Env;
using base::UsageError;
using ::testing::HasSubstr;
using tests::both;
using tests::environment;
using tests::message_of;
using tests::Variables;

const Variables kPet = {{"PET_NODE_RANK", "1"},
                        {"PET_NNODES", "2"},
                        {"PET_NPROC_PER_NODE", "1"},
                        {"PET_MASTER_ADDR", "job-node-0-0.job"},
                        {"PET_MASTER_PORT", "29500"}};
const Variables kMaster = {{"MASTER_ADDR", "job-0"}, {"MASTER_PORT", "23456"}};
// What each orchestrator sets in pod 1 of 2.
const Variables kTrainJob = kPet;
const Variables kPyTorchJob = both(kMaster, both(kPet, {{"RANK", "1"}, {"WORLD_SIZE", "2"}}));
const Variables kVolcano = both(kMaster, {{"RANK", "1"}, {"WORLD_SIZE", "2"}});
const Variables kAihc = both(kVolcano, {{"NPROC_PER_NODE", "1"}});
const Variables kJobSet = {{"JOB_COMPLETION_INDEX", "1"}};
const Variables kSageMaker = {{"SM_HOSTS", R"(["algo-1", "algo-2"])"}, {"SM_CURRENT_HOST", "algo-2"}};
// Ray's TorchTrainer starts the ranks of each node.
const Variables kRay = both(
    kMaster, {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}, {"NODE_RANK", "0"}});

Variables with_ranks(Variables variables, const std::string& name, const std::string& ranks) {
  variables[name] = ranks;
  return variables;
}

TEST(Pod, OneRankInEachPodJoins) {
  for (const Variables& variables : {kTrainJob, kPyTorchJob, kVolcano, kAihc, kSageMaker}) {
    const Identity id = identify(environment(variables));
    EXPECT_EQ(id.rank, 1);
    EXPECT_EQ(id.world_size, 2);
    EXPECT_EQ(id.store, StoreKind::kRankZero);
  }
  const Identity id = identify(environment(kTrainJob));
  EXPECT_EQ(id.source, "pod");
  EXPECT_EQ(to_string(id.address), "job-node-0-0.job:29500");
  EXPECT_EQ(identity_source(environment(kTrainJob)), "pod") << "a rank, which starts no others";
  EXPECT_EQ(identify(environment(with_ranks(kPet, "PET_NPROC_PER_NODE", "gpu"))).world_size, 2);
  EXPECT_EQ(identify(environment(kPyTorchJob)).source, "env://");
  EXPECT_EQ(identify(environment(both(kPyTorchJob, {{"LOCKSTEP_ENV_FROM", "pod"}}))).source, "pod");
}

TEST(Pod, SeveralRanksInAPodAreNotOne) {
  for (const auto& [variables, name] :
       {std::pair(kTrainJob, "PET_NPROC_PER_NODE"), {kPyTorchJob, "PET_NPROC_PER_NODE"}, {kAihc, "NPROC_PER_NODE"}}) {
    const Env env = environment(with_ranks(variables, name, "8"));
    const std::string text = message_of<UsageError>([&env = env] { identify(env); });
    EXPECT_THAT(text, HasSubstr("ask for 8 ranks"));
    EXPECT_THAT(text, HasSubstr(std::string(name) + "=8"));
  }
  const Variables own = with_ranks(kAihc, "NPROC_PER_NODE", "8");
  EXPECT_EQ(identify(environment(with_ranks(own, "LOCKSTEP_ENV_FROM", "torchrun"))).world_size, 2)
      << "as the user says";
}

TEST(Pod, UnknownWorldIsRefused) {
  const auto refused = [](const Variables& variables) {
    const Env env = environment(variables);
    return message_of<UsageError>([&] { identify(env); });
  };
  EXPECT_THAT(refused(kJobSet), HasSubstr("JOB_COMPLETION_INDEX=1), but no variables name its index and their number"));
  EXPECT_THAT(refused({{"SM_HOSTS", R"(["algo-1", "algo-2"])"}, {"SM_CURRENT_HOST", "algo-3"}}),
              HasSubstr("but no variables name its index"));
  Variables without_address = kPet;
  without_address.erase("PET_MASTER_ADDR");
  EXPECT_THAT(refused(without_address), HasSubstr("but no variables name the address of the first"));
  EXPECT_THAT(refused(with_ranks(kPet, "PET_NNODES", "1:4")), HasSubstr("PET_NNODES=1:4"));
  EXPECT_THAT(refused(with_ranks(kPet, "PET_NODE_RANK", "2")), HasSubstr("PET_NODE_RANK=2"));
  EXPECT_THAT(refused(with_ranks(kPet, "PET_NNODES", "two")), HasSubstr("PET_NNODES is \"two\""));
  EXPECT_THAT(refused({{"LOCKSTEP_ENV_FROM", "pod"}}), HasSubstr("no variable of a pod is set"));
}

TEST(Pod, RanksThatWereStartedInAPodKeepTheirVariables) {
  EXPECT_EQ(identify(environment(kRay)).world_size, 4);
  EXPECT_FALSE(find_pod(environment(kRay)));
  EXPECT_FALSE(find_pod(environment(both(kPet, {{"LOCKSTEP_RANK", "0"}})))) << "a rank of lockstep run";
  EXPECT_EQ(
      identify(environment(both(kRay, both(kPet, {{"TORCHELASTIC_RUN_ID", "none"}, {"PET_NPROC_PER_NODE", "2"}}))))
          .source,
      "torchrun");
}

TEST(Pod, LaunchersInAllPodsStartOneJob) {
  for (const Variables& variables : {kTrainJob, with_ranks(kTrainJob, "PET_NPROC_PER_NODE", "8"), kPyTorchJob, kVolcano,
                                     with_ranks(kAihc, "NPROC_PER_NODE", "8"), kSageMaker}) {
    const std::optional<Pod> pod = find_pod_of_several(environment(variables));
    ASSERT_TRUE(pod);
    EXPECT_EQ(pod->index, 1);
    EXPECT_EQ(pod->num_pods, 2);
    EXPECT_GT(first_address(*pod).port, 7000);
  }
  for (const Variables& variables : {kJobSet, with_ranks(kPet, "PET_NNODES", "1:4")}) {
    const Env env = environment(variables);
    EXPECT_THAT(message_of<UsageError>([&] { find_pod_of_several(env); }),
                HasSubstr("one of several pods (" + find_pod(env)->variables + ")"));
  }
  const Variables one = {{"PET_NNODES", "1"}, {"PET_NODE_RANK", "0"}};
  for (const Variables& variables : {Variables{}, one, kRay}) EXPECT_FALSE(find_pod_of_several(environment(variables)));
  EXPECT_EQ(identify(environment(one)).world_size, 1);
}

}  // namespace
}  // namespace lockstep::job::identity
