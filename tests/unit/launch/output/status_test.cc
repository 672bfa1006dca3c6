#include "lockstep/launch/output/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/base/net/socket.h"

namespace lockstep::launcher::output {
namespace {

using protocol::JobStatus;
using protocol::RankState;
using protocol::RankStatus;
using ::testing::HasSubstr;
using ::testing::Not;

base::telemetry::RankSnapshot page_of(const std::string& job, int rank) {
  return {.pid = 4711 + rank,
          .rank = rank,
          .world_size = 2,
          .job = job,
          .transport = "shm",
          .steps = 31,
          .gradient_reductions = 120,
          .waiting = true,
          .live_bytes = 3u << 20,
          .peak_live_bytes = 5u << 20,
          .high_water_bytes = 6u << 20,
          .resident_bytes = 7u << 20,
          .operations = {{.number = 1, .seq = 7, .started = 1, .channel = "world", .kind = "barrier"}}};
}

RankStatus rank_of(int rank, const std::string& host = "alpha") {
  return {.rank = rank,
          .host = host,
          .state = RankState::kRunning,
          .pid = 4711 + rank,
          .cpu_percent = 98,
          .resident_bytes = 900u << 20,
          .page = page_of("a", rank)};
}

JobStatus job_of(std::vector<RankStatus> ranks, bool is_whole = true) {
  return {.label = {.id = "a", .name = "train", .launcher_host = "alpha", .launcher_pid = 77, .world_size = 2},
          .is_whole = is_whole,
          .ranks = std::move(ranks)};
}

TEST(Status, NoRanksIsReported) { EXPECT_EQ(status_text({}, "alpha", false), "no ranks of this user on this host\n"); }

TEST(Status, OneTablePerJob) {
  JobStatus other = job_of({rank_of(1)}, false);
  other.label = {.id = "b", .name = {}, .launcher_host = {}, .world_size = 2};
  const std::string text = status_text({job_of({rank_of(0), rank_of(1)}), other}, "alpha", false);
  EXPECT_THAT(text, HasSubstr("job train (lockstep run with pid 77): 2 of 2 ranks\n"));
  EXPECT_THAT(text, HasSubstr("\n\njob b: 1 of 2 ranks on this host\n"));
  EXPECT_THAT(text, HasSubstr("\n rank      pid    cpu         rss  transport  reductions       arena        peak    "
                              "resident  state\n"));
  EXPECT_THAT(text, HasSubstr("    1     4712    98%     900 MiB  shm               120       3 MiB       5 MiB       "
                              "7 MiB  running\n  ranks 0,1, step 31: waits in barrier#7 of world"));
  EXPECT_THAT(text, Not(HasSubstr("init()")));
}

TEST(Status, RanksOfSeveralHostsHaveAColumn) {
  RankStatus silent{.rank = 1, .host = "beta-long"};
  JobStatus job = job_of({rank_of(0), silent});
  const std::string text = status_text({job}, "gamma", false);
  EXPECT_THAT(text, HasSubstr("job train (lockstep run with pid 77 on alpha): 2 of 2 ranks on 2 hosts\n"
                              " rank  host           pid "));
  EXPECT_THAT(text, HasSubstr("    0  alpha         4711    98%"));
  EXPECT_THAT(text, HasSubstr("    1  beta-long        -      -           -  -     "));
  EXPECT_THAT(text, HasSubstr("  unknown: its host has not replied\n"));
  EXPECT_THAT(text, Not(HasSubstr("init()")));
}

TEST(Status, StatesAreDistinguished) {
  RankStatus started = rank_of(0), left = rank_of(1), stopped = rank_of(2), exited = rank_of(3);
  started.page.reset();
  left.page->has_left = true;
  stopped.state = RankState::kStopped;
  exited.state = RankState::kExited;
  exited.page->operations[0].name = "of an exited rank";
  const std::string text = status_text({job_of({started, left, stopped, exited})}, "alpha", false);
  EXPECT_THAT(text, HasSubstr("  running, no init() yet\n"));
  EXPECT_THAT(text, HasSubstr("  running, has left its world\n"));
  EXPECT_THAT(text, HasSubstr("  stopped\n"));
  EXPECT_THAT(text, HasSubstr("  exited\n"));
  EXPECT_THAT(text, HasSubstr("no init() yet: not a Lockstep program, or one that is still starting\n"));
  EXPECT_THAT(text, Not(HasSubstr("of an exited rank")));
}

TEST(Status, OneJsonObjectPerLine) {
  RankStatus plain = rank_of(1);
  plain.page.reset();
  plain.cpu_percent.reset();
  JobStatus job = job_of({rank_of(0), plain});
  job.label.name = "a \"b\"";
  std::istringstream lines(status_text({job}, "alpha", true));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto first = nlohmann::json::parse(line);
  EXPECT_EQ(first["job"], "a");
  EXPECT_EQ(first["name"], "a \"b\"");
  EXPECT_EQ(first["launcher_pid"], 77);
  EXPECT_EQ(first["host"], "alpha");
  EXPECT_EQ(first["state"], "running");
  EXPECT_EQ(first["cpu_percent"], 98);
  EXPECT_EQ(first["resident_bytes"], 900 << 20);
  EXPECT_EQ(first["initialized"], true);
  EXPECT_EQ(first["exchanges"], 120);
  EXPECT_EQ(first["step"], 31);
  EXPECT_EQ(first["operation"], "barrier#7 of world");
  EXPECT_EQ(first["waiting"], true);
  EXPECT_EQ(first["arena"]["resident_bytes"], 7 << 20);
  ASSERT_TRUE(std::getline(lines, line));
  const auto second = nlohmann::json::parse(line);
  EXPECT_EQ(second["rank"], 1);
  EXPECT_EQ(second["initialized"], false);
  EXPECT_TRUE(second["cpu_percent"].is_null());
  EXPECT_FALSE(second.contains("transport"));
  EXPECT_FALSE(std::getline(lines, line));
  EXPECT_EQ(status_text({}, "alpha", true), "");
}

TEST(Status, LaunchersReportTakesPrecedence) {
  RankStatus of_agent = rank_of(0, "from agent"), unknown{.rank = 1, .host = "beta"};
  const auto jobs =
      combine_reports({job_of({of_agent, rank_of(1, "from agent")}, false), job_of({rank_of(0), unknown})}, {}, "here");
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_TRUE(jobs[0].is_whole);
  ASSERT_EQ(jobs[0].ranks.size(), 2u);
  EXPECT_EQ(jobs[0].ranks[0].host, "alpha");
  EXPECT_EQ(jobs[0].ranks[1].host, "from agent") << "the launcher does not know this rank";
}

TEST(Status, PagesOfOtherLaunchersAreAdded) {
  const auto jobs = combine_reports({job_of({rank_of(0)})},
                                    {page_of("z", 1), page_of("a", 0), page_of("z", 0), page_of("a", 1)}, "here");
  ASSERT_EQ(jobs.size(), 2u);
  ASSERT_EQ(jobs[0].ranks.size(), 2u);
  EXPECT_EQ(jobs[0].ranks[0].host, "alpha");
  EXPECT_EQ(jobs[0].ranks[1].host, "here");
  EXPECT_EQ(jobs[1].label.id, "z");
  EXPECT_EQ(jobs[1].label.world_size, 2);
  EXPECT_FALSE(jobs[1].is_whole);
  ASSERT_EQ(jobs[1].ranks.size(), 2u);
  EXPECT_EQ(jobs[1].ranks[0].rank, 0);
  EXPECT_EQ(jobs[1].ranks[0].pid, 4711);
  EXPECT_EQ(jobs[1].ranks[0].state, RankState::kRunning);
}

TEST(Status, ProcessesWithoutLauncherAreSeparate) {
  std::vector<base::telemetry::RankSnapshot> pages = {page_of("0", 0), page_of("0", 0)};
  pages[1].pid = 4712;
  const auto jobs = combine_reports({}, pages, "here");
  ASSERT_EQ(jobs.size(), 1u);
  ASSERT_EQ(jobs[0].ranks.size(), 2u) << "all of them have the job ID 0";
  EXPECT_EQ(jobs[0].ranks[1].pid, 4712);
}

TEST(Status, RanksOfOtherLaunchersAreMeasured) {
  const std::string id = "job-of-process-" + std::to_string(::getpid());
  base::telemetry::publish_to(base::telemetry::RankPage::this_process(),
                              {.rank = 1, .world_size = 3, .job = id, .transport = "test"});
  ::testing::internal::CaptureStdout();
  print_status(true);
  std::istringstream lines(::testing::internal::GetCapturedStdout());
  nlohmann::json rank;
  for (std::string line; std::getline(lines, line);)
    if (const auto one = nlohmann::json::parse(line); one["job"] == id) rank = one;
  ASSERT_FALSE(rank.is_null());
  EXPECT_EQ(rank["pid"], ::getpid());
  EXPECT_EQ(rank["rank"], 1);
  EXPECT_EQ(rank["world_size"], 3);
  EXPECT_EQ(rank["launcher_pid"], 0);
  EXPECT_EQ(rank["name"], "");
  EXPECT_EQ(rank["host"], base::net::host_name());
  EXPECT_EQ(rank["state"], "running");
  EXPECT_EQ(rank["transport"], "test");
  EXPECT_TRUE(rank["cpu_percent"].is_number());
  EXPECT_GT(rank["resident_bytes"], 1 << 20);
}

}  // namespace
}  // namespace lockstep::launcher::output
