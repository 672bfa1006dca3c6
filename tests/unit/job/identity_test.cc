#include "lockstep/job/identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::job {
namespace {

using base::Env;
using base::UsageError;
using ::testing::HasSubstr;
using tests::message_of;
using Variables = std::map<std::string, std::string>;

Identity from(const Variables& variables, const ExplicitIdentity& given = {}) {
  return identify(Env::from([&](const char* name) -> Env::Value {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : Env::Value(found->second);
  }), given);
}

void expect_refused(const Variables& variables, const std::string& part, const ExplicitIdentity& given = {}) {
  const std::string text = message_of<UsageError>([&] { from(variables, given); });
  EXPECT_THAT(text, HasSubstr(part));
}

const Variables kLockstep = {{"LOCKSTEP_RANK", "5"},       {"LOCKSTEP_WORLD_SIZE", "8"},       {"LOCKSTEP_LOCAL_RANK", "1"},
                             {"LOCKSTEP_NODE_RANK", "1"},  {"LOCKSTEP_LOCAL_WORLD_SIZE", "4"}, {"LOCKSTEP_NUM_NODES", "2"},
                             {"LOCKSTEP_STORE", "alpha:4242"}, {"LOCKSTEP_JOB", "key"}};
const Variables kTorchrun = {{"RANK", "1"},        {"WORLD_SIZE", "2"},        {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                             {"GROUP_RANK", "0"},  {"GROUP_WORLD_SIZE", "1"},  {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "run"}, {"TORCHELASTIC_RESTART_COUNT", "3"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kMpi = {{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"PMIX_NAMESPACE", "4711.1"}};
const Variables kByHand = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}};

Variables with(Variables base, const std::string& name, const std::string& value) {
  base[name] = value;
  return base;
}
Variables without(Variables base, const std::string& name) {
  base.erase(name);
  return base;
}
Variables both(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

TEST(Identity, NothingIsAWorldOfOne) {
  const Identity id = from({});
  EXPECT_EQ(id.contract, "none");
  EXPECT_EQ(id.world_size, 1);
  EXPECT_EQ(id.store, StoreKind::kLocal);
  EXPECT_EQ(from({{"MASTER_ADDR", "h"}}).contract, "none");
}

TEST(Identity, OurLauncher) {
  const Identity id = from(kLockstep);
  EXPECT_EQ(id.contract, "lockstep");
  EXPECT_EQ(id.rank, 5);
  EXPECT_EQ(id.world_size, 8);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(id.local_world_size, 4);
  EXPECT_EQ(id.node_rank, 1);
  EXPECT_EQ(id.num_nodes, 2);
  EXPECT_EQ(id.store, StoreKind::kLauncher);
  EXPECT_EQ(base::to_string(id.address), "alpha:4242");
  EXPECT_EQ(id.job, "key");
}

TEST(Identity, Torchrun) {
  const Identity id = from(kTorchrun);
  EXPECT_EQ(id.contract, "torchrun");
  EXPECT_EQ(id.store, StoreKind::kTorchrun);
  EXPECT_EQ(id.job, "run");
  EXPECT_EQ(id.generation, 3);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(from(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).store, StoreKind::kRankZero);
  EXPECT_EQ(from(with(with(kTorchrun, "WORLD_SIZE", "1"), "RANK", "0")).store, StoreKind::kTorchrun);
}

TEST(Identity, ByHand) {
  const Identity id = from(kByHand);
  EXPECT_EQ(id.contract, "env://");
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(base::to_string(id.address), "h:29500");
  EXPECT_EQ(id.local_rank, -1);
  EXPECT_EQ(from({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).store, StoreKind::kLocal);
}

TEST(Identity, OpenMpi) {
  const Identity id = from(kMpi);
  EXPECT_EQ(id.contract, "mpi");
  EXPECT_EQ(id.rank, 3);
  EXPECT_EQ(id.world_size, 4);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(id.local_world_size, 2);
  EXPECT_EQ(id.num_nodes, -1);
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(id.address.host, "") << "MPI is asked";
  EXPECT_EQ(id.job, "4711.1");
  EXPECT_EQ(base::to_string(from(with(kMpi, "LOCKSTEP_STORE", "a:5")).address), "a:5");
  EXPECT_EQ(base::to_string(from(with(with(kMpi, "MASTER_ADDR", "b"), "MASTER_PORT", "6")).address), "b:6");
  EXPECT_EQ(from(with(with(kMpi, "OMPI_COMM_WORLD_SIZE", "1"), "OMPI_COMM_WORLD_RANK", "0")).world_size, 1);
  EXPECT_EQ(from(both(kMpi, kByHand)).contract, "env://");
  EXPECT_EQ(from(with(both(kMpi, kByHand), "LOCKSTEP_ENV_FROM", "mpi")).contract, "mpi");
  expect_refused(without(kMpi, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set");
  expect_refused(with(kMpi, "MASTER_ADDR", "b"), "MASTER_PORT is not set");
}

TEST(Identity, Pmi) {
  const Identity id = from({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_JOBID", "9"}});
  EXPECT_EQ(id.contract, "pmi");
  EXPECT_EQ(id.rank, 1);
  EXPECT_EQ(id.world_size, 2);
  EXPECT_EQ(id.job, "9");
  EXPECT_EQ(from({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).store, StoreKind::kLocal);
}

TEST(Identity, TheProgramOutranksTheEnvironment) {
  const Identity id = from(kLockstep, {.rank = 0, .world_size = 2, .address = "x:1"});
  EXPECT_EQ(id.contract, "explicit");
  EXPECT_EQ(id.world_size, 2);
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(from({}, {.rank = 0, .world_size = 1}).store, StoreKind::kLocal);
}

TEST(Identity, WhichContractCountsWhenThereAreSeveral) {
  EXPECT_EQ(from(both(kLockstep, kTorchrun)).contract, "lockstep");
  EXPECT_EQ(from(with(both(kLockstep, kTorchrun), "LOCKSTEP_ENV_FROM", "torchrun")).rank, 1);
  EXPECT_EQ(from(with(both(kLockstep, kTorchrun), "LOCKSTEP_ENV_FROM", "none")).world_size, 1);
  EXPECT_EQ(from(with(both(kLockstep, kTorchrun), "LOCKSTEP_ENV_FROM", "lockstep")).rank, 5);
  expect_refused({{"LOCKSTEP_ENV_FROM", "slurm"}}, "LOCKSTEP_ENV_FROM is \"slurm\"; allowed are none, lockstep, torchrun, mpi and pmi");
  expect_refused({{"LOCKSTEP_ENV_FROM", "torchrun"}}, "WORLD_SIZE is not set");
}

TEST(Identity, WhatIsMissingIsNamed) {
  for (const char* const name : {"LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_STORE", "LOCKSTEP_JOB"})
    expect_refused(without(kLockstep, name), std::string(name) + " is not set");
  for (const char* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    expect_refused(without(kByHand, name), std::string(name) + " is not set");
    expect_refused(without(kTorchrun, name), std::string(name) + " is not set");
  }
  expect_refused({}, "InitOptions.world_size is not set", {.rank = 0});
  expect_refused({}, "InitOptions.rank is not set", {.world_size = 2});
  expect_refused({}, "InitOptions.world_size is not set", {.address = "a:1"});
  expect_refused({}, "InitOptions.address is empty", {.rank = 0, .world_size = 2});
}

TEST(Identity, WhatContradictsIsNamedWithItsValue) {
  expect_refused(with(kByHand, "RANK", "2"), "RANK is 2, but WORLD_SIZE is 2; allowed is 0 to 1");
  expect_refused(with(kByHand, "RANK", "-1"), "RANK is \"-1\"");
  expect_refused(with(kByHand, "WORLD_SIZE", "0"), "WORLD_SIZE is \"0\"; allowed is an integer from 1");
  expect_refused(with(kByHand, "WORLD_SIZE", "two"), "WORLD_SIZE is \"two\"");
  expect_refused(with(kByHand, "MASTER_PORT", "123456"), "MASTER_PORT is \"123456\"; allowed is an integer from 1 to 65535");
  expect_refused(with(kTorchrun, "LOCAL_RANK", "2"), "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2");
  expect_refused(with(kTorchrun, "GROUP_RANK", "1"), "GROUP_RANK is 1, but GROUP_WORLD_SIZE is 1");
  expect_refused(with(kLockstep, "LOCKSTEP_STORE", "alpha"), "LOCKSTEP_STORE is \"alpha\"; allowed is host:port");
  expect_refused({}, "InitOptions.rank is 3, but InitOptions.world_size is 2", {.rank = 3, .world_size = 2, .address = "a:1"});
  expect_refused({}, "InitOptions.world_size is \"0\"", {.rank = 0, .world_size = 0});
}

}  // namespace
}  // namespace lockstep::job
