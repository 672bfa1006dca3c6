#include "lockstep/launch/slurm/allocation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/launch/slurm/step_task.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::slurm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Variables = std::map<std::string, std::string>;

base::Env env(const Variables& variables) {
  return base::Env([&](const char* name) -> base::Env::Value {
    const auto found = variables.find(name);
    return found == variables.end() ? base::Env::Value() : base::Env::Value(found->second);
  });
}

const Variables kBatch = {{"SLURM_JOB_ID", "5"}, {"SLURM_JOB_NODELIST", "n[1-3]"}, {"SLURM_TASKS_PER_NODE", "2(x2),1"},
                          {"SLURM_NTASKS", "5"}, {"SLURMD_NODENAME", "n1"},        {"SLURM_PROCID", "0"}};

std::vector<std::string> to_texts(const std::vector<cli::HostSpec>& hosts) {
  std::vector<std::string> all;
  for (const cli::HostSpec& host : hosts)
    all.push_back(host.name + ":" + std::to_string(host.slots) + (host.is_slurm ? " step" : "") +
                  (host.is_local ? " local" : ""));
  return all;
}

TEST(Allocation, HostFileOfMpirunIsThatOfTheJob) {
  const tests::TempDir folder;
  const std::string file = folder / "hostfile";
  std::ofstream(file) << "job-worker-0.job-worker slots=2\njob-worker-1.job-worker slots=2\n";
  const Variables variables = {{"OMPI_MCA_orte_default_hostfile", file}};
  EXPECT_THAT(to_texts(resolve_hosts({}, "auto", env(variables))),
              ElementsAre("job-worker-0.job-worker:2", "job-worker-1.job-worker:2"));
  EXPECT_THAT(resolve_hosts({}, "none", env(variables)), IsEmpty());
  EXPECT_THAT(to_texts(resolve_hosts({{.name = "a"}}, "auto", env(variables))), ElementsAre("a:0"));
  Variables in_mpirun = variables;
  in_mpirun["OMPI_COMM_WORLD_SIZE"] = "2";
  EXPECT_THAT(resolve_hosts({}, "auto", env(in_mpirun)), IsEmpty());
  EXPECT_THAT(tests::message_of<base::UsageError>(
                  [] { resolve_hosts({}, "auto", env({{"OMPI_MCA_orte_default_hostfile", "/no/hostfile"}})); }),
              HasSubstr("OMPI_MCA_orte_default_hostfile is \"/no/hostfile\": No such file"));
}

TEST(Allocation, NoHostsMeansThisHost) { EXPECT_THAT(resolve_hosts({}, "auto", env({{"PATH", "/bin"}})), IsEmpty()); }

TEST(Allocation, BatchScriptProvidesHostsAndSlots) {
  EXPECT_THAT(to_texts(resolve_hosts({}, "auto", env(kBatch))),
              ElementsAre("n1:2 step local", "n2:2 step", "n3:1 step"));
}

TEST(Allocation, SeveralComponentsAreRefused) {
  Variables variables = kBatch;
  variables["SLURM_HET_SIZE"] = "2";
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { resolve_hosts({}, "auto", env(variables)); }),
              HasSubstr("this SLURM job has 2 components (SLURM_HET_SIZE); expected a job of one component"));
  variables["SLURM_HET_SIZE"] = "1";
  EXPECT_EQ(resolve_hosts({}, "auto", env(variables)).size(), 3u);
}

TEST(Allocation, SlotsAreUnsetWithoutATaskCount) {
  Variables salloc = kBatch;
  salloc.erase("SLURM_NTASKS");
  salloc.erase("SLURM_PROCID");
  EXPECT_THAT(to_texts(resolve_hosts({}, "auto", env(salloc))),
              ElementsAre("n1:0 step local", "n2:0 step", "n3:0 step"));
}

TEST(Allocation, EnvFromSkipsOrRequiresTheAllocation) {
  EXPECT_THAT(resolve_hosts({}, "none", env(kBatch)), IsEmpty());
  EXPECT_EQ(resolve_hosts({}, "slurm", env(kBatch)).size(), 3u);
  EXPECT_THAT(tests::message_of<base::UsageError>([] { resolve_hosts({}, "slurm", env({})); }),
              HasSubstr("--env-from is \"slurm\""));
}

TEST(Allocation, NamedHostsInTheAllocationUseSrun) {
  cli::HostSpec two, other;
  two.name = "n2";
  two.slots = 7;
  other.name = "login";
  EXPECT_THAT(to_texts(resolve_hosts({two, other}, "auto", env(kBatch))), ElementsAre("n2:7 step", "login:0"));
  two.user = "ada";
  EXPECT_THAT(to_texts(resolve_hosts({two}, "auto", env(kBatch))), ElementsAre("n2:7"));
}

TEST(Allocation, SeveralLaunchersAreRejected) {
  Variables step = kBatch;
  step["SLURM_STEP_ID"] = "0";
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { resolve_hosts({}, "auto", env(step)); }),
              HasSubstr("srun has started lockstep run 5 times"));
  step["SLURM_NTASKS"] = "1";
  step["SLURM_TASKS_PER_NODE"] = "1";  // of the step
  EXPECT_THAT(to_texts(resolve_hosts({}, "auto", env(step))), ElementsAre("n1:0 step local", "n2:0 step", "n3:0 step"));
  step["SLURM_NTASKS"] = "5";
  step["SLURM_STEP_ID"] = "4294967290";  // an interactive shell
  step["SLURM_TASKS_PER_NODE"] = kBatch.at("SLURM_TASKS_PER_NODE");
  EXPECT_EQ(resolve_hosts({}, "auto", env(step)).size(), 3u);
}

TEST(Allocation, MismatchedCountsAreRejected) {
  Variables odd = kBatch;
  odd["SLURM_TASKS_PER_NODE"] = "2(x2)";
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { resolve_hosts({}, "auto", env(odd)); }),
              HasSubstr("counts for 2 hosts; expected the 3 hosts of SLURM_JOB_NODELIST"));
}

TEST(StepTask, FirstTaskLaunchesAndOthersWait) {
  Variables task = {{"SLURM_JOB_ID", "5"},
                    {"SLURM_STEP_ID", "1"},
                    {"SLURM_STEP_NODELIST", "n[2-3]"},
                    {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                    {"SLURM_PROCID", "0"}};
  EXPECT_THAT(*task_arguments(8, env(task)), ElementsAre("run", "-H", "n2:8,n3:8", "--slurm-step", "5.1"));
  EXPECT_THAT(*task_arguments(0, env(task)), ElementsAre("run", "-H", "n2,n3", "--slurm-step", "5.1"));
  EXPECT_FALSE(task_arguments(1, env(task)));
  task["SLURM_PROCID"] = "1";
  EXPECT_THAT(*task_arguments(8, env(task)), ElementsAre("agent", "--wait-in-step", "5.1"));
  task["SLURM_STEP_TASKS_PER_NODE"] = "1,2";
  EXPECT_FALSE(task_arguments(8, env(task)));
}

}  // namespace
}  // namespace lockstep::launcher::slurm
