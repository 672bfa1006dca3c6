#include "lockstep/job/identity/identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/job/identity/variables.h"

namespace lockstep::job::identity {
namespace {

using base::UsageError;
using ::testing::HasSubstr;
using tests::both;
using tests::environment;
using tests::message_of;
using tests::Variables;

Identity from(const Variables& variables, const ExplicitIdentity& given = {}) {
  return identify(environment(variables), given);
}

void expect_refused(const Variables& variables, const std::string& part, const ExplicitIdentity& given = {}) {
  const std::string text = message_of<UsageError>([&] { from(variables, given); });
  EXPECT_THAT(text, HasSubstr(part));
}

const Variables kLockstep = {{"LOCKSTEP_RANK", "5"},
                             {"LOCKSTEP_WORLD_SIZE", "8"},
                             {"LOCKSTEP_LOCAL_RANK", "1"},
                             {"LOCKSTEP_NODE_RANK", "1"},
                             {"LOCKSTEP_LOCAL_WORLD_SIZE", "4"},
                             {"LOCKSTEP_NUM_NODES", "2"},
                             {"LOCKSTEP_STORE", "alpha:4242"},
                             {"LOCKSTEP_JOB", "key"}};
const Variables kTorchrun = {{"RANK", "1"},
                             {"WORLD_SIZE", "2"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"GROUP_RANK", "0"},
                             {"GROUP_WORLD_SIZE", "1"},
                             {"MASTER_ADDR", "h"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "run"},
                             {"TORCHELASTIC_RESTART_COUNT", "3"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                        {"OMPI_COMM_WORLD_SIZE", "4"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"PMIX_NAMESPACE", "4711.1"}};
// The variables of the third task of `srun -N2 -n3` with two tasks on the first host, in a job that was requeued once.
const Variables kSlurm = {{"SLURM_PROCID", "2"},
                          {"SLURM_NTASKS", "3"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_NUM_NODES", "2"},
                          {"SLURM_JOB_ID", "71"},
                          {"SLURM_STEP_NODELIST", "alpha[07-08]"},
                          {"SLURM_STEP_ID", "4"},
                          {"SLURM_RESTART_COUNT", "1"},
                          {"SLURM_JOB_NODELIST", "alpha[06-08]"},
                          {"SLURM_TASKS_PER_NODE", "2(x3)"}};
const Variables kPmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_JOBID", "9"}, {"PMI_FD", "6"}};
const Variables kHydra = {{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}};
const Variables kPmix = {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "slurm.pmix.71.4"}};
const Variables kEnvUrl = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}};

Variables with(Variables base, const std::string& name, const std::string& value) {
  base[name] = value;
  return base;
}
Variables without(Variables base, const std::string& name) {
  base.erase(name);
  return base;
}

TEST(Identity, NoVariablesMeanWorldSizeOne) {
  const Identity id = from({});
  EXPECT_EQ(id.source, "none");
  EXPECT_EQ(id.world_size, 1);
  EXPECT_EQ(id.store, StoreKind::kLocal);
  EXPECT_EQ(from({{"MASTER_ADDR", "h"}}).source, "none");
}

TEST(Identity, LockstepRun) {
  const Identity id = from(kLockstep);
  EXPECT_EQ(id.source, "lockstep");
  EXPECT_EQ(id.rank, 5);
  EXPECT_EQ(id.world_size, 8);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(id.local_world_size, 4);
  EXPECT_EQ(id.node_rank, 1);
  EXPECT_EQ(id.num_nodes, 2);
  EXPECT_EQ(id.store, StoreKind::kLauncher);
  EXPECT_EQ(base::net::to_string(id.address), "alpha:4242");
  EXPECT_EQ(id.job, "key");
  EXPECT_EQ(id.generation, 0);
  EXPECT_EQ(from(with(kLockstep, "LOCKSTEP_GENERATION", "2")).generation, 2);
  expect_refused(with(kLockstep, "LOCKSTEP_GENERATION", "-1"), "LOCKSTEP_GENERATION is \"-1\"");
}

TEST(Identity, TorchrunInsideARank) {
  const Variables own = {{"TORCHELASTIC_RUN_ID", "key"}, {"LOCAL_WORLD_SIZE", "4"}};  // as lockstep run sets them
  EXPECT_EQ(from(both(kLockstep, own)).source, "lockstep");
  const Variables inner = with(own, "TORCHELASTIC_RUN_ID", "none");
  expect_refused(both(kLockstep, inner), "torchrun has started this process inside rank 5 of lockstep run");
  EXPECT_EQ(from(both(kLockstep, with(inner, "LOCAL_WORLD_SIZE", "1"))).rank, 5);
}

TEST(Identity, Torchrun) {
  const Identity id = from(kTorchrun);
  EXPECT_EQ(id.source, "torchrun");
  EXPECT_EQ(id.store, StoreKind::kTorchrun);
  EXPECT_EQ(id.job, "run");
  EXPECT_EQ(id.generation, 3);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(from(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).store, StoreKind::kRankZero);
  EXPECT_EQ(from(with(with(kTorchrun, "WORLD_SIZE", "1"), "RANK", "0")).store, StoreKind::kTorchrun);
}

TEST(Identity, EnvUrl) {
  const Identity id = from(kEnvUrl);
  EXPECT_EQ(id.source, "env://");
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(base::net::to_string(id.address), "h:29500");
  EXPECT_EQ(id.local_rank, -1);
  EXPECT_EQ(from({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).store, StoreKind::kLocal);
}

TEST(Identity, OpenMpi) {
  const Identity id = from(kMpi);
  EXPECT_EQ(id.source, "mpi");
  EXPECT_EQ(id.rank, 3);
  EXPECT_EQ(id.world_size, 4);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(id.local_world_size, 2);
  EXPECT_EQ(id.num_nodes, -1);
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(id.address.host, "") << "init() exchanges it by MPI";
  EXPECT_EQ(id.job, "4711.1");
  EXPECT_EQ(base::net::to_string(from(with(kMpi, "LOCKSTEP_STORE", "a:5")).address), "a:5");
  EXPECT_EQ(base::net::to_string(from(with(with(kMpi, "MASTER_ADDR", "b"), "MASTER_PORT", "6")).address), "b:6");
  EXPECT_EQ(from(with(with(kMpi, "OMPI_COMM_WORLD_SIZE", "1"), "OMPI_COMM_WORLD_RANK", "0")).world_size, 1);
  EXPECT_EQ(from(both(kMpi, kEnvUrl)).source, "env://");
  EXPECT_EQ(from(with(both(kMpi, kEnvUrl), "LOCKSTEP_ENV_FROM", "mpi")).source, "mpi");
  expect_refused(without(kMpi, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set");
  expect_refused(without(kMpi, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set");
  expect_refused(with(kMpi, "MASTER_ADDR", "b"), "MASTER_PORT is not set");
}

TEST(Identity, Pmi) {
  const Identity id = from({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_JOBID", "9"}});
  EXPECT_EQ(id.source, "pmi");
  EXPECT_EQ(id.rank, 1);
  EXPECT_EQ(id.world_size, 2);
  EXPECT_EQ(id.job, "9");
  EXPECT_EQ(from({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).store, StoreKind::kLocal);
  EXPECT_EQ(from(both(kPmi, kHydra)).local_world_size, 1);
  expect_refused(without(kPmi, "PMI_SIZE"), "PMI_SIZE is not set");
  expect_refused(without(kPmi, "PMI_RANK"), "PMI_RANK is not set");
  expect_refused(with(kPmi, "PMI_RANK", "2"), "PMI_RANK is 2, but PMI_SIZE is 2; expected 0 to 1");
}

TEST(Identity, SlurmStep) {
  const Identity id = from(kSlurm);
  EXPECT_EQ(id.source, "slurm");
  EXPECT_EQ(id.rank, 2);
  EXPECT_EQ(id.world_size, 3);
  EXPECT_EQ(id.local_rank, 0);
  EXPECT_EQ(id.local_world_size, 1);
  EXPECT_EQ(id.node_rank, 1);
  EXPECT_EQ(id.num_nodes, 2);
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(base::net::to_string(id.address), "alpha07:22175");
  EXPECT_EQ(id.job, "slurm-71.4");
  EXPECT_EQ(id.generation, 1);
}

TEST(Identity, SlurmStepStoreAddress) {
  const Identity one_host = from(with(with(kSlurm, "SLURM_STEP_NUM_NODES", "1"), "SLURM_NODEID", "0"));
  EXPECT_EQ(one_host.address.host, "127.0.0.1");
  EXPECT_NE(from(with(kSlurm, "SLURM_STEP_ID", "5")).address.port, from(kSlurm).address.port);
  EXPECT_EQ(base::net::to_string(from(with(kSlurm, "LOCKSTEP_STORE", "a:5")).address), "a:5");
  EXPECT_EQ(base::net::to_string(from(with(with(kSlurm, "MASTER_ADDR", "b"), "MASTER_PORT", "6")).address), "b:6");
  expect_refused(with(kSlurm, "MASTER_ADDR", "b"), "MASTER_PORT is not set");
  for (const std::int64_t job : {std::int64_t{0}, std::int64_t{1}, std::int64_t{123456}, std::int64_t{0xffffffff}})
    for (const std::int64_t step : {0, 9999, 123456}) {
      EXPECT_GE(slurm_port(job, step), 15000);
      EXPECT_LT(slurm_port(job, step), 25000);
    }
  const Identity alone = from(with(with(kSlurm, "SLURM_NTASKS", "1"), "SLURM_PROCID", "0"));
  EXPECT_EQ(alone.store, StoreKind::kLocal);
  EXPECT_EQ(alone.source, "slurm");
}

TEST(Identity, SlurmVariablesOutsideAStepAreIgnored) {
  EXPECT_EQ(from(without(kSlurm, "SLURM_STEP_ID")).source, "none") << "a batch script";
  for (const char* const special : {"4294967290", "4294967291", "4294967292"})
    EXPECT_EQ(from(with(kSlurm, "SLURM_STEP_ID", special)).source, "none")
        << "a shell that salloc started in a step of its own";
  EXPECT_EQ(from(without(kSlurm, "SLURM_PROCID")).source, "none") << "an allocation";
  expect_refused(with(without(kSlurm, "SLURM_STEP_ID"), "LOCKSTEP_ENV_FROM", "slurm"), "SLURM_STEP_ID is not set");
  expect_refused(with(with(kSlurm, "SLURM_STEP_ID", "4294967291"), "LOCKSTEP_ENV_FROM", "slurm"),
                 "SLURM_STEP_ID is \"4294967291\"; expected an integer from 0 to 4294967279");
}

TEST(Identity, InvalidSlurmStepIsRejected) {
  for (const char* const name : {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"})
    expect_refused(without(kSlurm, name),
                   std::string(name) + " is not set, but other variables of the source slurm are");
  expect_refused(with(kSlurm, "SLURM_PROCID", "3"), "SLURM_PROCID is 3, but SLURM_NTASKS is 3; expected 0 to 2");
  expect_refused(with(kSlurm, "SLURM_STEP_ID", "x"), "SLURM_STEP_ID is \"x\"; expected an integer");
  expect_refused(with(kSlurm, "SLURM_LOCALID", "1"),
                 "SLURM_LOCALID is 1, but this host's entry in SLURM_STEP_TASKS_PER_NODE is 1");
  expect_refused(with(kSlurm, "SLURM_NODEID", "2"), "SLURM_NODEID is 2, but SLURM_STEP_NUM_NODES is 2");
  expect_refused(with(kSlurm, "SLURM_STEP_TASKS_PER_NODE", "3"),
                 "SLURM_NODEID is 1, but SLURM_STEP_TASKS_PER_NODE is \"3\", which describes 1 host");
  expect_refused(with(kSlurm, "SLURM_STEP_TASKS_PER_NODE", "2(x"),
                 "SLURM_STEP_TASKS_PER_NODE is \"2(x\": a number is missing at column 4");
  expect_refused(with(kSlurm, "SLURM_STEP_NODELIST", "a["),
                 "SLURM_STEP_NODELIST is \"a[\": a number is missing at column 3");
  expect_refused(with(kSlurm, "SLURM_RESTART_COUNT", "-1"), "SLURM_RESTART_COUNT is \"-1\"");
  EXPECT_EQ(from(without(without(kSlurm, "SLURM_LOCALID"), "SLURM_NODEID")).local_rank, -1) << "join() determines it";
}

TEST(Identity, Pmix) {
  const Identity id = from(with(kPmix, "SLURM_NTASKS", "2"));
  EXPECT_EQ(id.source, "pmix");
  EXPECT_EQ(id.rank, 1);
  EXPECT_EQ(id.world_size, 2);
  EXPECT_EQ(id.job, "slurm.pmix.71.4");
  EXPECT_EQ(id.address.host, "");
  EXPECT_EQ(from(with(kPmix, "OMPI_COMM_WORLD_SIZE", "4")).world_size, 4);
  expect_refused(kPmix,
                 "PMIX_RANK is \"1\", but no variable gives the number of ranks: neither OMPI_COMM_WORLD_SIZE nor "
                 "SLURM_NTASKS is set");
  expect_refused(with(without(kPmix, "PMIX_NAMESPACE"), "SLURM_NTASKS", "2"), "PMIX_NAMESPACE is not set");
  expect_refused(with(kPmix, "SLURM_NTASKS", "1"), "PMIX_RANK is 1, but SLURM_NTASKS is 1; expected 0 to 0");
}

TEST(Identity, InitOptionsOverrideTheEnvironment) {
  const Identity id = from(kLockstep, {.rank = 0, .world_size = 2, .address = "x:1"});
  EXPECT_EQ(id.source, "explicit");
  EXPECT_EQ(id.world_size, 2);
  EXPECT_EQ(id.store, StoreKind::kRankZero);
  EXPECT_EQ(from({}, {.rank = 0, .world_size = 1}).store, StoreKind::kLocal);
}

TEST(Identity, PrecedenceOfSources) {
  EXPECT_EQ(from(both(kLockstep, with(kTorchrun, "TORCHELASTIC_RUN_ID", "key"))).source, "lockstep");
  EXPECT_EQ(from(with(both(kLockstep, kTorchrun), "LOCKSTEP_ENV_FROM", "torchrun")).rank, 1);
  EXPECT_EQ(from(with(both(kLockstep, kTorchrun), "LOCKSTEP_ENV_FROM", "none")).world_size, 1);
  EXPECT_EQ(from(with(both(kLockstep, kTorchrun), "LOCKSTEP_ENV_FROM", "lockstep")).rank, 5);
  expect_refused({{"LOCKSTEP_ENV_FROM", "slurms"}},
                 "LOCKSTEP_ENV_FROM is \"slurms\"; expected auto, none, lockstep, torchrun, mpi, slurm, pmi or pod");
  expect_refused({{"LOCKSTEP_ENV_FROM", "torchrun"}}, "WORLD_SIZE is not set");
}

TEST(Identity, NestedLaunchers) {
  EXPECT_EQ(from(both(kMpi, kSlurm)).source, "mpi") << "the SLURM step consists of mpirun's daemons";
  EXPECT_EQ(from(both(kMpi, kSlurm)).rank, 3);
  EXPECT_EQ(from(both(kSlurm, kPmi)).source, "slurm") << "srun --mpi=pmi2";
  EXPECT_EQ(from(both(kSlurm, kPmix)).source, "slurm") << "srun --mpi=pmix";
  EXPECT_EQ(from(both(both(kSlurm, kPmi), kHydra)).source, "pmi") << "the SLURM step consists of Hydra's daemons";
  EXPECT_EQ(from(both(kPmi, kPmix)).source, "pmi");
  EXPECT_EQ(from(both(kSlurm, kTorchrun)).source, "torchrun");
  EXPECT_EQ(from(both(kSlurm, kLockstep)).source, "lockstep");
  EXPECT_EQ(from(both(kSlurm, kEnvUrl)).source, "env://");
  EXPECT_EQ(from({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}).source, "pmi")
      << "mpiexec in a batch script";
  EXPECT_EQ(from(with(kSlurm, "LOCKSTEP_STORE", "a:5")).source, "slurm");
  EXPECT_EQ(from(with(with(kPmix, "SLURM_NTASKS", "2"), "LOCKSTEP_STORE", "a:5")).source, "pmix");
}

TEST(Identity, EnvFromForcesASource) {
  const Variables all =
      both(both(both(kSlurm, kMpi), both(kPmi, kPmix)), both(kLockstep, with(kTorchrun, "TORCHELASTIC_RUN_ID", "key")));
  const auto forced = [&](const Variables& variables, const char* name) {
    return from(with(variables, "LOCKSTEP_ENV_FROM", name)).source;
  };
  for (const char* const name : {"none", "lockstep", "torchrun", "mpi", "slurm", "pmi"})
    EXPECT_EQ(forced(all, name), name);
  EXPECT_EQ(forced(all, "auto"), "lockstep");
  EXPECT_EQ(forced(without(without(all, "PMI_RANK"), "PMI_SIZE"), "pmi"), "pmix");
  EXPECT_EQ(from(with(all, "LOCKSTEP_ENV_FROM", "mpi"), {.env_from = "slurm"}).source, "slurm")
      << "the program's option overrides the variable";
  EXPECT_EQ(from(with(all, "LOCKSTEP_ENV_FROM", "mpi"), {.env_from = "auto"}).source, "lockstep");
  EXPECT_EQ(from(all, {.rank = 0, .world_size = 1, .env_from = "slurm"}).source, "explicit");
  expect_refused(all, "InitOptions.env_from is \"srun\"; expected auto", {.env_from = "srun"});
  expect_refused({}, "SLURM_NTASKS is not set", {.env_from = "slurm"});
  expect_refused({}, "PMI_SIZE is not set", {.env_from = "pmi"});
}

TEST(Identity, LaunchedProcessIsRecognised) {
  const auto launched = [](const Variables& variables) { return !identity_source(environment(variables)).empty(); };
  for (const Variables& variables : {kLockstep, kTorchrun, kMpi, kSlurm, kPmi, kPmix, kEnvUrl})
    EXPECT_TRUE(launched(variables));
  EXPECT_TRUE(launched({{"LOCKSTEP_ENV_FROM", "none"}}));
  EXPECT_FALSE(launched({{"LOCKSTEP_ENV_FROM", "auto"}}));
  EXPECT_FALSE(launched({}));
  EXPECT_FALSE(launched(without(kSlurm, "SLURM_STEP_ID"))) << "a batch script";
  EXPECT_EQ(identity_source(environment(kSlurm)), "slurm");
  EXPECT_EQ(identity_source(environment({{"LOCKSTEP_RANK", "0"}})), "lockstep")
      << "an incomplete set of variables also makes a rank: init() names the missing ones";
}

TEST(Identity, MissingVariableIsNamed) {
  for (const char* const name : {"LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_STORE", "LOCKSTEP_JOB"})
    expect_refused(without(kLockstep, name), std::string(name) + " is not set");
  for (const char* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    expect_refused(without(kEnvUrl, name), std::string(name) + " is not set");
    expect_refused(without(kTorchrun, name), std::string(name) + " is not set");
  }
  expect_refused({}, "InitOptions.world_size is not set", {.rank = 0});
  expect_refused({}, "InitOptions.rank is not set", {.world_size = 2});
  expect_refused({}, "InitOptions.world_size is not set", {.address = "a:1"});
  expect_refused({}, "InitOptions.address is empty", {.rank = 0, .world_size = 2});
}

TEST(Identity, ContradictingValueIsNamed) {
  expect_refused(with(kEnvUrl, "RANK", "2"), "RANK is 2, but WORLD_SIZE is 2; expected 0 to 1");
  expect_refused(with(kEnvUrl, "RANK", "-1"), "RANK is \"-1\"");
  expect_refused(with(kEnvUrl, "WORLD_SIZE", "0"), "WORLD_SIZE is \"0\"; expected an integer from 1");
  expect_refused(with(kEnvUrl, "WORLD_SIZE", "two"), "WORLD_SIZE is \"two\"");
  expect_refused(with(kEnvUrl, "MASTER_PORT", "123456"),
                 "MASTER_PORT is \"123456\"; expected an integer from 1 to 65535");
  expect_refused(with(kTorchrun, "LOCAL_RANK", "2"), "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2");
  expect_refused(with(kTorchrun, "GROUP_RANK", "1"), "GROUP_RANK is 1, but GROUP_WORLD_SIZE is 1");
  expect_refused(with(kLockstep, "LOCKSTEP_STORE", "alpha"), "LOCKSTEP_STORE is \"alpha\"; expected host:port");
  expect_refused({}, "InitOptions.rank is 3, but InitOptions.world_size is 2",
                 {.rank = 3, .world_size = 2, .address = "a:1"});
  expect_refused({}, "InitOptions.world_size is \"0\"", {.rank = 0, .world_size = 0});
}

}  // namespace
}  // namespace lockstep::job::identity
