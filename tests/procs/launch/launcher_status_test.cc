// Tests what `lockstep status` prints about ranks on one host: of any program, and while the launcher is stopped.
#include <gmock/gmock.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/base/net/socket.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kRankProgram = LOCKSTEP_RESTART_PROBE_PATH;
constexpr std::uint64_t kMiB = 1 << 20;

/// Returns the objects that `lockstep status --json` prints about the ranks of the run `name`. Other tests run at the
/// same time.
std::vector<json> ranks_of(const std::string& name) {
  SpawnOptions options;
  options.argv = {kLockstep, "status", "--json"};
  std::istringstream lines(run_process(options).out);
  std::vector<json> ranks;
  for (std::string line; std::getline(lines, line);)
    if (const json rank = json::parse(line); rank["name"] == name) ranks.push_back(rank);
  return ranks;
}

/// Returns what `lockstep status` prints about the run `name`.
std::string table_of(const std::string& name) {
  SpawnOptions options;
  options.argv = {kLockstep, "status"};
  const std::string all = run_process(options).out;
  const std::size_t begin = all.find("job " + name + " (");
  return begin == std::string::npos ? "" : all.substr(begin, all.find("\n\n", begin) - begin);
}

bool all_have_state(const std::string& name, std::size_t count, const std::string& state) {
  const std::vector<json> ranks = ranks_of(name);
  return ranks.size() == count &&
         std::all_of(ranks.begin(), ranks.end(), [&](const json& rank) { return rank["state"] == state; });
}

void stop(Process& job) {
  job.signal(SIGTERM);
  job.wait(Deadline::in(20s));
}

TEST(LauncherStatus, RanksOfAnyProgramAreListedWithTheirResources) {
  Process job(shell_ranks(2,
                          "[ $RANK = 0 ] && exec sleep 60\n"
                          "exec python3 -c 'held = b\"x\" * (64 << 20)\nwhile True: pass'",
                          {"--name", "any_program"}));
  std::vector<json> ranks;
  ASSERT_TRUE(eventually(Deadline::in(20s), [&] {
    ranks = ranks_of("any_program");
    return ranks.size() == 2 && ranks[1]["cpu_percent"].is_number() && ranks[1]["cpu_percent"] > 10 &&
           ranks[1]["resident_bytes"] > 64 * kMiB;
  })) << json(ranks);
  for (int rank = 0; rank < 2; ++rank) {
    const json& one = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(one["rank"], rank);
    EXPECT_EQ(one["world_size"], 2);
    EXPECT_EQ(one["state"], "running");
    EXPECT_EQ(one["initialized"], false);
    EXPECT_EQ(one["host"], base::net::host_name());
    EXPECT_EQ(one["launcher_pid"], job.pid());
    EXPECT_FALSE(one.contains("transport"));
    EXPECT_THAT(command_of(one["pid"]), HasSubstr(rank == 0 ? "sleep 60" : "python3 -c"));
  }
  EXPECT_LT(ranks[0]["resident_bytes"], 32 * kMiB);
  EXPECT_GT(ranks[0]["resident_bytes"], 0);
  EXPECT_LT(ranks[1]["cpu_percent"], 150) << "one thread uses at most one core";
  EXPECT_TRUE(eventually(Deadline::in(10s), [&] { return ranks_of("any_program")[0]["cpu_percent"] == 0; }));
  EXPECT_THAT(
      table_of("any_program"),
      AllOf(HasSubstr("job any_program (lockstep run with pid " + std::to_string(job.pid()) +
                      "): 2 of 2 ranks\n rank      pid    cpu         rss  transport"),
            HasSubstr("running, no init() yet\n"), HasSubstr("not a Lockstep program"), Not(HasSubstr("host"))));
  stop(job);
}

TEST(LauncherStatus, LockstepProgramsAndOthersAreToldApart) {
  const TempDir folder;
  Process job(shell_ranks(3,
                          "[ $RANK = 0 ] && exec sleep 60\n[ $RANK = 1 ] && exit 0\nexec " + kRankProgram + " " +
                              folder.path() + " 1 1 hold",
                          {"--name", "mixture"}));
  ASSERT_TRUE(job.wait_for("held", Deadline::in(20s)));
  std::vector<json> ranks;
  ASSERT_TRUE(eventually(Deadline::in(20s), [&] {
    ranks = ranks_of("mixture");
    return ranks.size() == 3 && ranks[1]["state"] == "exited" && ranks[2]["state"] == "stopped";
  })) << json(ranks);
  EXPECT_EQ(ranks[0]["state"], "running");
  EXPECT_EQ(ranks[0]["initialized"], false);
  EXPECT_EQ(ranks[1]["pid"], 0);
  EXPECT_TRUE(ranks[1]["resident_bytes"].is_null());
  EXPECT_EQ(ranks[2]["initialized"], true);
  EXPECT_EQ(ranks[2]["transport"], "probe");
  EXPECT_EQ(ranks[2]["step"], 0);
  EXPECT_THAT(command_of(ranks[2]["pid"]), HasSubstr(kRankProgram));
  const std::string table = table_of("mixture");
  EXPECT_THAT(table, AllOf(HasSubstr(" MiB  probe  "), HasSubstr(" stopped\n"), HasSubstr(" exited\n")));
  stop(job);
}

TEST(LauncherStatus, RanksOfOneProgramAreLockstepPrograms) {
  const TempDir folder;
  Process job(
      lockstep_run({"-n", "2", "--name", "lockstep_program", kRankProgram, folder.path(), "1000000", "1000000"}));
  std::vector<json> ranks;
  ASSERT_TRUE(eventually(Deadline::in(20s), [&] {
    ranks = ranks_of("lockstep_program");
    return ranks.size() == 2 && ranks[0].value("step", 0) > 3 && ranks[1].value("step", 0) > 3;
  })) << json(ranks);
  EXPECT_THAT(table_of("lockstep_program"), Not(HasSubstr("init()")));
  stop(job);
}

TEST(LauncherStatus, AgentReportsRanksOfAStoppedLauncher) {
  Process job(shell_ranks(2, "exec sleep 60", {"--name", "stopped_launcher"}));
  ASSERT_TRUE(eventually(Deadline::in(20s), [&] { return all_have_state("stopped_launcher", 2, "running"); }));
  job.signal(SIGSTOP);
  SpawnOptions options;
  options.argv = {kLockstep, "status", "--json"};
  const ProcessResult status = run_process(options);
  EXPECT_EQ(status.code, 0);
  EXPECT_LT(status.elapsed, 10s);
  EXPECT_THAT(status.err, HasSubstr("lockstep process " + std::to_string(job.pid()) + " has not replied\n"));
  std::size_t num_ranks = 0;
  std::istringstream lines(status.out);
  for (std::string line; std::getline(lines, line);)
    num_ranks += line.find("\"name\":\"stopped_launcher\"") != std::string::npos;
  EXPECT_EQ(num_ranks, 2u) << status.out;
  job.signal(SIGCONT);
  EXPECT_TRUE(eventually(Deadline::in(10s), [&] { return all_have_state("stopped_launcher", 2, "running"); }));
  stop(job);
}

}  // namespace
}  // namespace lockstep::tests
