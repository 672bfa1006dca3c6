#include "lockstep/launch/plan/job_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::plan {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

cli::RunOptions options(int ranks) {
  cli::RunOptions run;
  run.ranks = ranks;
  run.command = {"train", "--lr", "0.1"};
  return run;
}

LaunchContext context() {
  LaunchContext launch;
  launch.environment = {"HOME=/root", "EMPTY=", "ODD=a=b\nc"};
  launch.program = "/bin/train";
  launch.launcher_directory = "/home/user";
  launch.store = {"127.0.0.1", 4711};
  launch.job = "abc";
  launch.master = {"127.0.0.1", 2222};
  return launch;
}

Node node(int ranks, bool is_local = true, const std::string& name = "alpha") {
  Node one{.info = {.host = name + ".cluster"}, .name = name, .ranks = ranks, .is_local = is_local};
  one.info.cpus = {{0, 0, 0}, {1, 1, 0}, {2, 2, 0}, {3, 3, 0}};
  return one;
}

JobPlan plan_job(const cli::RunOptions& run, const LaunchContext& launch) {
  return plan_jobs(run, launch, {node(run.ranks)}).front();
}

TEST(JobPlan, AllRanksGetJobAndTorchrunVariables) {
  const JobPlan job = plan_job(options(2), context());
  EXPECT_EQ(job.program, "/bin/train");
  EXPECT_THAT(job.arguments, ElementsAre("train", "--lr", "0.1"));
  for (const char* variable : {"LOCKSTEP_WORLD_SIZE=2", "LOCKSTEP_LOCAL_WORLD_SIZE=2", "LOCKSTEP_NODE_RANK=0",
                               "LOCKSTEP_NUM_NODES=1", "LOCKSTEP_STORE=127.0.0.1:4711", "LOCKSTEP_JOB=abc",
                               "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "GROUP_RANK=0", "NODE_RANK=0", "ROLE_NAME=default",
                               "ROLE_WORLD_SIZE=2", "TORCHELASTIC_RUN_ID=abc", "TORCHELASTIC_USE_AGENT_STORE=False",
                               "MASTER_ADDR=127.0.0.1", "MASTER_PORT=2222", "HOME=/root", "EMPTY=", "ODD=a=b\nc"})
    EXPECT_THAT(job.environment, Contains(variable));
}

TEST(JobPlan, RanksGetTheGeneration) {
  LaunchContext launch = context();
  launch.environment.push_back("TORCHELASTIC_RESTART_COUNT=9");
  launch.environment.push_back("LOCKSTEP_GENERATION=9");
  launch.generation = 2;
  cli::RunOptions run = options(2);
  run.max_restarts = 5;
  const JobPlan job = plan_job(run, launch);
  for (const char* variable : {"LOCKSTEP_GENERATION=2", "TORCHELASTIC_RESTART_COUNT=2", "TORCHELASTIC_MAX_RESTARTS=5"})
    EXPECT_THAT(job.environment, Contains(variable));
  for (const char* variable : {"LOCKSTEP_GENERATION=9", "TORCHELASTIC_RESTART_COUNT=9"})
    EXPECT_THAT(job.environment, Not(Contains(variable)));
}

TEST(JobPlan, RanksGetRunNameAndTrace) {
  cli::RunOptions run = options(2);
  for (const std::string& variable : plan_job(run, context()).environment) {
    EXPECT_FALSE(variable.starts_with("LOCKSTEP_NAME")) << variable;
    EXPECT_FALSE(variable.starts_with("LOCKSTEP_TRACE")) << variable;
  }
  run.name = "first";
  run.trace = true;
  for (const char* variable : {"LOCKSTEP_NAME=first", "LOCKSTEP_TRACE=1"})
    EXPECT_THAT(plan_job(run, context()).environment, Contains(variable));
}

TEST(JobPlan, EachRankHasItsIndicesCoresAndThreads) {
  const JobPlan job = plan_job(options(2), context());
  ASSERT_EQ(job.ranks.size(), 2u);
  EXPECT_EQ(job.ranks[1].rank, 1);
  for (const char* variable :
       {"LOCKSTEP_RANK=1", "LOCKSTEP_LOCAL_RANK=1", "RANK=1", "LOCAL_RANK=1", "ROLE_RANK=1", "OMP_NUM_THREADS=2"})
    EXPECT_THAT(job.ranks[1].environment, Contains(variable));
  EXPECT_THAT(job.ranks[1].cpus, ElementsAre(2, 3));
  EXPECT_THAT(job.ranks[1].arguments, IsEmpty());
}

TEST(JobPlan, NoVariableIsSetTwice) {
  LaunchContext launch = context();
  for (const char* variable : {"RANK=9", "LOCKSTEP_RANK=9", "MASTER_PORT=1", "OMP_NUM_THREADS=", "LOCKSTEP_STORE=x"})
    launch.environment.push_back(variable);
  cli::RunOptions run = options(3);
  run.transport = "tcp";
  run.hang_timeout = std::chrono::milliseconds(7500);
  run.join_timeout = std::chrono::milliseconds(2500);
  const JobPlan job = plan_job(run, launch);
  for (const RankPlan& rank : job.ranks) {
    std::vector<std::string> names;
    for (const process::Environment* part : {&job.environment, &rank.environment})
      for (const std::string& variable : *part) names.push_back(variable.substr(0, variable.find('=')));
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  }
  EXPECT_THAT(job.environment, Contains("LOCKSTEP_TRANSPORT=tcp"));
  EXPECT_THAT(job.environment, Contains("LOCKSTEP_TIMEOUT=17.5"));
  EXPECT_THAT(job.environment, Contains("LOCKSTEP_JOIN_TIMEOUT=2.5"));
}

TEST(JobPlan, RankTimeoutExceedsTheLaunchers) {
  LaunchContext launch = context();
  EXPECT_THAT(plan_job(options(2), launch).environment, Contains("LOCKSTEP_TIMEOUT=310"));
  launch.environment.push_back("LOCKSTEP_TIMEOUT=5");  // set by the user
  EXPECT_THAT(plan_job(options(2), launch).environment, Contains("LOCKSTEP_TIMEOUT=5"));
  cli::RunOptions run = options(2);
  run.hang_timeout = std::chrono::milliseconds(0);
  EXPECT_THAT(plan_job(run, launch).environment, Contains("LOCKSTEP_TIMEOUT=0"));
  EXPECT_EQ(health_limits(run, {}).stall.count(), 0);  // a debugger also stops heartbeats
  run.stall_timeout = std::chrono::milliseconds(9000);
  EXPECT_EQ(health_limits(run, {}).stall.count(), 9000);
  EXPECT_EQ(health_limits(options(2), {}).stall.count(), 30000);
  EXPECT_EQ(health_limits(options(2), {"LOCKSTEP_TIMEOUT=7200"}).hang, std::chrono::hours(2));
  EXPECT_EQ(health_limits(options(2), {"LOCKSTEP_TIMEOUT=0"}).stall.count(), 0);
}

TEST(JobPlan, VariablesOfOtherLaunchersAreRemoved) {
  LaunchContext launch = context();
  launch.environment = {"TORCHELASTIC_RUN_ID=none",
                        "TORCHELASTIC_USE_AGENT_STORE=True",
                        "ROLE_RANK=3",
                        "SLURM_PROCID=0",
                        "SLURM_NTASKS=4",
                        "SLURM_NTASKS_PER_NODE=2",
                        "SLURM_NPROCS=4",
                        "SLURM_STEP_ID=0",
                        "SLURM_STEPID=0",
                        "SLURM_JOB_ID=5",
                        "SLURM_JOB_NODELIST=h1",
                        "PMI_RANK=0",
                        "LOCKSTEP_TERMINAL=80",
                        "LOCKSTEP_PAGE=5",
                        "LOCKSTEP_ENV_FROM=slurm"};
  const JobPlan job = plan_job(options(1), launch);
  for (const char* name : {"TORCHELASTIC_RUN_ID=none", "TORCHELASTIC_USE_AGENT_STORE=True", "ROLE_RANK", "SLURM_PROCID",
                           "SLURM_N", "SLURM_STEP", "PMI_", "LOCKSTEP_TERMINAL", "LOCKSTEP_PAGE", "LOCKSTEP_ENV_FROM"})
    EXPECT_THAT(job.environment, Not(Contains(StartsWith(name)))) << name;
  for (const char* variable : {"SLURM_JOB_ID=5", "SLURM_JOB_NODELIST=h1"})
    EXPECT_THAT(job.environment, Contains(variable));
}

TEST(JobPlan, UserThreadCountIsKept) {
  LaunchContext launch = context();
  launch.environment.push_back("OMP_NUM_THREADS=5");
  const JobPlan job = plan_job(options(2), launch);
  EXPECT_THAT(job.environment, Contains("OMP_NUM_THREADS=5"));
  EXPECT_THAT(job.ranks[0].environment, Not(Contains(StartsWith("OMP_NUM_THREADS"))));
}

TEST(JobPlan, MoreRanksThanCoresHaveOneThreadEach) {
  const JobPlan job = plan_job(options(6), context());
  EXPECT_THAT(job.ranks[5].environment, Contains("OMP_NUM_THREADS=1"));
}

TEST(JobPlan, UnboundRanksShareThreads) {
  cli::RunOptions run = options(2);
  run.bind = cli::Bind::kNone;
  const JobPlan job = plan_job(run, context());
  EXPECT_THAT(job.ranks[0].cpus, IsEmpty());
  EXPECT_THAT(job.ranks[0].environment, Contains("OMP_NUM_THREADS=2"));
}

TEST(JobPlan, PythonIsNotBoundToASingleCore) {
  LaunchContext launch = context();
  launch.runs_python = true;
  cli::RunOptions run = options(4);
  EXPECT_THAT(plan_job(run, launch).ranks[0].cpus, IsEmpty());
  EXPECT_THAT(plan_job(options(2), launch).ranks[0].cpus, Not(IsEmpty()));
  run.bind = cli::Bind::kCores;
  EXPECT_THAT(plan_job(run, launch).ranks[0].cpus, Not(IsEmpty()));
  launch.runs_python = false;
  EXPECT_THAT(plan_job(options(4), launch).ranks[0].cpus, Not(IsEmpty()));
}

/// A quota of 4 of 64 cores: the rest of the cores is for other containers, at other times.
TEST(JobPlan, CpuQuotaBoundsRanksAndThreads) {
  const LaunchContext launch = context();
  Node large{.info = {.cpu_quota = 4}, .name = "beta", .is_local = true};
  for (int core = 0; core < 64; ++core) large.info.cpus.push_back({core, core, 0});
  EXPECT_EQ(default_ranks(options(0), launch, large), 4);
  for (const auto& [ranks, threads] : {std::pair(1, "4"), {2, "2"}, {3, "1"}, {8, "1"}}) {
    large.ranks = ranks;
    const JobPlan job = plan_jobs(options(ranks), launch, {large}).front();
    EXPECT_THAT(job.ranks[0].environment, Contains("OMP_NUM_THREADS=" + std::string(threads)));
    EXPECT_THAT(job.ranks[0].cpus, IsEmpty()) << "not bound";
  }
  large.info.cpu_quota = 64;
  large.ranks = 2;
  EXPECT_EQ(plan_jobs(options(2), launch, {large}).front().ranks[0].cpus.size(), 32u) << "the quota is no limit";
}

TEST(JobPlan, LocalRankIsTheLastArgument) {
  cli::RunOptions run = options(2);
  run.local_rank_argument = "local_rank";
  EXPECT_THAT(plan_job(run, context()).ranks[1].arguments, ElementsAre("--local_rank=1"));
}

TEST(JobPlan, PrefixReducesTerminalColumns) {
  LaunchContext launch = context();
  launch.columns = 80;
  EXPECT_THAT(plan_job(options(2), launch).environment, Contains("LOCKSTEP_TERMINAL=76"));
  EXPECT_THAT(plan_job(options(11), launch).environment, Contains("LOCKSTEP_TERMINAL=75"));
}

int ranks_of(const process::Environment& environment, int gpus, int cores, const std::string& named = "",
             const std::string& of_host = "") {
  cli::RunOptions run = options(0);
  run.gpus = named;
  LaunchContext launch = context();
  launch.environment = environment;
  Node one{.info = {.gpus = gpus, .visible_gpus = of_host},
           .name = "beta",
           .is_local = of_host.empty(),
           .is_slurm = !of_host.empty()};
  for (int core = 0; core < cores; ++core) one.info.cpus.push_back({core, core, 0});
  return default_ranks(run, launch, one);
}

TEST(JobPlan, DefaultRanks) {
  EXPECT_EQ(ranks_of({}, 0, 6), 6);
  EXPECT_EQ(ranks_of({}, 4, 6), 4);
  EXPECT_EQ(ranks_of({"CUDA_VISIBLE_DEVICES=0,3"}, 4, 6), 2);
  EXPECT_EQ(ranks_of({"CUDA_VISIBLE_DEVICES=0,-1,3"}, 4, 6), 1);
  EXPECT_EQ(ranks_of({"CUDA_VISIBLE_DEVICES=0,1"}, 0, 6), 6);
  EXPECT_EQ(ranks_of({}, 0, 0), 1);
  EXPECT_EQ(ranks_of({}, 8, 6, "4,5"), 2);
  EXPECT_EQ(ranks_of({"CUDA_VISIBLE_DEVICES=0"}, 8, 6, "", "2,3"), 2);
}

TEST(JobPlan, PerRankVariablesAreNotInherited) {
  EXPECT_THAT(process::remove_variables({"RANK=9", "HOME=/root", "OMP_NUM_THREADS=7"}, {"RANK=1", "OMP_NUM_THREADS=2"}),
              ElementsAre("HOME=/root"));
}

TEST(JobPlan, RanksAreContiguousOnEachHost) {
  LaunchContext launch = context();
  launch.columns = 80;
  const std::vector<JobPlan> jobs = plan_jobs(options(5), launch, {node(2), node(3, false, "beta")});
  ASSERT_EQ(jobs.size(), 2u);
  for (const JobPlan& job : jobs)
    for (const char* variable : {"LOCKSTEP_WORLD_SIZE=5", "WORLD_SIZE=5", "LOCKSTEP_NUM_NODES=2", "GROUP_WORLD_SIZE=2",
                                 "LOCKSTEP_TERMINAL=70"})
      EXPECT_THAT(job.environment, Contains(variable));
  for (const char* variable : {"LOCKSTEP_NODE_RANK=1", "NODE_RANK=1", "GROUP_RANK=1", "LOCAL_WORLD_SIZE=3"})
    EXPECT_THAT(jobs[1].environment, Contains(variable));
  ASSERT_EQ(jobs[1].ranks.size(), 3u);
  EXPECT_EQ(jobs[1].ranks[0].rank, 2);
  EXPECT_THAT(jobs[1].ranks[2].environment, Contains("RANK=4"));
  EXPECT_THAT(jobs[1].ranks[2].environment, Contains("LOCAL_RANK=2"));
  EXPECT_THAT(jobs[1].ranks[2].cpus, ElementsAre(2, 3));  // four cores for three ranks
}

TEST(JobPlan, RanksGetHorovodsVariables) {
  LaunchContext launch = context();
  launch.environment.push_back("HOROVOD_RANK=9");
  const std::vector<JobPlan> jobs =
      plan_jobs(options(6), launch, {node(2), node(1, false, "beta"), node(3, false, "gamma")});
  const auto expect_values = [&](std::size_t host, std::size_t local, const std::string& values) {
    std::istringstream expected(values);
    for (const char* name : {"RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"}) {
      std::string value;
      expected >> value;
      EXPECT_THAT(jobs[host].ranks[local].environment, Contains("HOROVOD_" + std::string(name) + "=" + value));
    }
    EXPECT_THAT(jobs[host].environment, Not(Contains(StartsWith("HOROVOD_RANK"))));
  };
  expect_values(0, 0, "0 6 0 2 0 3 alpha.cluster");
  expect_values(0, 1, "1 6 1 2 0 2 alpha.cluster");
  expect_values(1, 0, "2 6 0 1 1 3 beta.cluster");
  expect_values(2, 1, "4 6 1 3 1 2 gamma.cluster");
  expect_values(2, 2, "5 6 2 3 0 1 gamma.cluster");
}

TEST(JobPlan, RemoteHostsGetForwardedAndExportedVariables) {
  LaunchContext launch = context();
  launch.environment =
      apply_exports({"HOME=/root", "PATH=/venv/bin", "SECRET_WORD=x", "TORCH_TOKEN=y", "MINE=1", "NCCL_DEBUG=INFO"},
                    {"MINE", "YOURS=a=b\n", "NCCL_DEBUG=WARN"});
  launch.exported = {"MINE", "YOURS", "NCCL_DEBUG"};
  const std::vector<JobPlan> jobs = plan_jobs(options(2), launch, {node(1), node(1, false, "beta")});
  EXPECT_TRUE(jobs[1].extends_own_environment);
  for (const char* variable : {"PATH=/venv/bin", "MINE=1", "YOURS=a=b\n", "NCCL_DEBUG=WARN"}) {
    EXPECT_THAT(jobs[0].environment, Contains(variable));
    EXPECT_THAT(jobs[1].environment, Contains(variable));
  }
  for (const char* name : {"HOME", "SECRET_WORD", "TORCH_TOKEN"})
    EXPECT_THAT(jobs[1].environment, Not(Contains(StartsWith(name)))) << name;
  EXPECT_THAT(jobs[0].environment, Contains("SECRET_WORD=x"));
  EXPECT_THAT(jobs[0].environment, Not(Contains("NCCL_DEBUG=INFO")));
}

TEST(JobPlan, UnsetExportIsAnError) {
  EXPECT_THAT(tests::message_of<base::UsageError>([] { apply_exports({"A=1"}, {"B"}); }), HasSubstr("-x \"B\""));
  EXPECT_THAT(apply_exports({"A="}, {"A"}), ElementsAre("A="));
  EXPECT_THAT(apply_exports({}, {"A=1", "A=2"}), ElementsAre("A=2"));
}

TEST(JobPlan, DirectoryAppliesToRemoteHosts) {
  LaunchContext launch = context();
  std::vector<JobPlan> jobs = plan_jobs(options(2), launch, {node(1), node(1, false, "beta")});
  EXPECT_EQ(jobs[0].directory, "");
  EXPECT_EQ(jobs[1].directory, "/home/user");
  launch.directory = "/data";
  jobs = plan_jobs(options(2), launch, {node(1), node(1, false, "beta")});
  EXPECT_EQ(jobs[0].directory, "/data");
  EXPECT_EQ(jobs[1].directory, "/data");
}

TEST(JobPlan, SocketIfnameVariablesFollowTheInterface) {
  LaunchContext launch = context();
  EXPECT_THAT(plan_jobs(options(2), launch, {node(2)})[0].environment,
              AllOf(Contains("GLOO_SOCKET_IFNAME=lo"), Not(Contains(StartsWith("NCCL_SOCKET_IFNAME=")))));
  launch.environment.push_back("GLOO_SOCKET_IFNAME=eth7");
  EXPECT_THAT(plan_jobs(options(2), launch, {node(2)})[0].environment, Not(Contains("GLOO_SOCKET_IFNAME=lo")));
  launch.environment.pop_back();
  Node one = node(1), other = node(1, false, "beta");
  one.interface = "eth0";
  other.interface = "ens3";
  launch.environment.push_back("NCCL_SOCKET_IFNAME=ib0");
  std::vector<JobPlan> jobs = plan_jobs(options(2), launch, {one, other});
  EXPECT_THAT(jobs[0].environment, Contains("GLOO_SOCKET_IFNAME=eth0"));
  EXPECT_THAT(jobs[1].environment, Contains("GLOO_SOCKET_IFNAME=ens3"));
  EXPECT_THAT(jobs[1].environment, Contains("NCCL_SOCKET_IFNAME=ib0"));
  EXPECT_THAT(jobs[1].environment, Not(Contains("NCCL_SOCKET_IFNAME=ens3")));
  EXPECT_THAT(jobs[1].environment, Not(Contains(StartsWith("LOCKSTEP_INTERFACE"))));
  cli::RunOptions run = options(2);
  run.interface = "10.0.0.0/8";
  jobs = plan_jobs(run, launch, {one, other});
  EXPECT_THAT(jobs[1].environment, Contains("LOCKSTEP_INTERFACE=ens3"));
}

std::vector<std::string> gpus_of_ranks(const cli::RunOptions& run, const process::Environment& environment,
                                       int gpus = 0) {
  LaunchContext launch = context();
  launch.environment = environment;
  Node one = node(run.ranks);
  one.info.gpus = gpus;
  const JobPlan job = plan_jobs(run, launch, {one}).front();
  std::vector<std::string> gpus_seen;
  for (const RankPlan& rank : job.ranks) {
    std::string value = "-";
    for (const process::Environment* part : {&job.environment, &rank.environment})
      for (const std::string& variable : *part)
        if (variable.rfind("CUDA_VISIBLE_DEVICES=", 0) == 0)
          value = (value == "-" ? "" : value + " and ") + variable.substr(21);
    gpus_seen.push_back(value);
  }
  return gpus_seen;
}

TEST(JobPlan, EachRankSeesAllGpus) {
  EXPECT_THAT(gpus_of_ranks(options(2), {}), ElementsAre("-", "-"));
  EXPECT_THAT(gpus_of_ranks(options(2), {"CUDA_VISIBLE_DEVICES=4,5"}), ElementsAre("4,5", "4,5"));
  EXPECT_THAT(gpus_of_ranks(options(2), {"CUDA_VISIBLE_DEVICES="}), ElementsAre("", ""));
  cli::RunOptions run = options(2);
  run.gpus = "6,7";
  EXPECT_THAT(gpus_of_ranks(run, {"CUDA_VISIBLE_DEVICES=4,5"}), ElementsAre("6,7", "6,7"));
  run.isolate_gpus = true;
  EXPECT_THAT(gpus_of_ranks(run, {"CUDA_VISIBLE_DEVICES=4,5"}), ElementsAre("6", "7"));
  run.gpus.clear();
  EXPECT_THAT(gpus_of_ranks(run, {"CUDA_VISIBLE_DEVICES=4,5"}), ElementsAre("4", "5"));
  EXPECT_THAT(gpus_of_ranks(run, {}, 2), ElementsAre("0", "1"));
}

TEST(JobPlan, FewerGpusThanRanksRequiresShareGpus) {
  cli::RunOptions run = options(3);
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { gpus_of_ranks(run, {"CUDA_VISIBLE_DEVICES=4,5"}); }),
              HasSubstr("2 GPUs in its list for 3 ranks"));
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { gpus_of_ranks(run, {"CUDA_VISIBLE_DEVICES=4,-1,5"}); }),
              HasSubstr("1 GPUs"));
  run.share_gpus = true;
  run.isolate_gpus = true;
  EXPECT_THAT(gpus_of_ranks(run, {"CUDA_VISIBLE_DEVICES=4,5"}), ElementsAre("4", "5", "4"));
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { gpus_of_ranks(run, {}); }), HasSubstr("0 GPUs"));
}

TEST(JobPlan, ShareGpusSetsWhatNcclRequires) {
  cli::RunOptions run = options(2);
  EXPECT_THAT(plan_jobs(run, context(), {node(2)})[0].ranks[1].environment,
              Not(Contains(HasSubstr("NCCL_MULTI_RANK_GPU_ENABLE"))));
  run.share_gpus = true;
  LaunchContext launch = context();
  launch.environment.push_back("NCCL_MAX_CTAS=4");
  const auto ranks = plan_jobs(run, launch, {node(2)})[0].ranks;
  for (const auto& rank : ranks) {
    EXPECT_THAT(rank.environment, Contains("NCCL_MULTI_RANK_GPU_ENABLE=1"));
    EXPECT_THAT(rank.environment, Contains("NCCL_NVLS_ENABLE=0"));
    EXPECT_THAT(rank.environment, Not(Contains(HasSubstr("NCCL_MAX_CTAS")))) << "the user's value is kept";
  }
}

TEST(JobPlan, GpusChosenBySlurmAreKept) {
  LaunchContext launch = context();
  launch.environment.push_back("CUDA_VISIBLE_DEVICES=0");
  Node other = node(1, false, "beta");
  other.info.visible_gpus = "3";
  EXPECT_THAT(plan_jobs(options(2), launch, {node(1), other})[1].environment, Contains("CUDA_VISIBLE_DEVICES=0"))
      << "over ssh, the launcher's variable takes precedence";
  other.is_slurm = true;
  std::vector<JobPlan> jobs = plan_jobs(options(2), launch, {node(1), other});
  EXPECT_THAT(jobs[1].environment, Contains("CUDA_VISIBLE_DEVICES=3"));
  launch.exported = {"CUDA_VISIBLE_DEVICES"};
  jobs = plan_jobs(options(2), launch, {node(1), other});
  EXPECT_THAT(jobs[1].environment, Contains("CUDA_VISIBLE_DEVICES=0"));
}

TEST(JobPlan, SlotsAreFilledInOrder) {
  EXPECT_THAT(fill_slots({4, 4}, 0), ElementsAre(4, 4));
  EXPECT_THAT(fill_slots({4, 4}, 5), ElementsAre(4, 1));
  EXPECT_THAT(fill_slots({4, 4}, 4), ElementsAre(4, 0));
  EXPECT_THAT(tests::message_of<base::UsageError>([] { fill_slots({4, 4}, 9); }),
              HasSubstr("-n is 9, but the hosts have 8 slots"));
}

}  // namespace
}  // namespace lockstep::launcher::plan
