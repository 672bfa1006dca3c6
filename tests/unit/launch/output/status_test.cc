#include "lockstep/launch/output/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

namespace lockstep::launcher::output {
namespace {

using ::testing::HasSubstr;

base::telemetry::RankSnapshot rank_of(const std::string& job, int rank) {
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

TEST(Status, NoRanksIsReported) { EXPECT_EQ(status_text({}, false), "no ranks of this user on this host\n"); }

TEST(Status, OneTablePerJob) {
  const std::string text = status_text({rank_of("a", 0), rank_of("a", 1), rank_of("b", 1)}, false);
  EXPECT_THAT(text, HasSubstr("job a: 2 of 2 ranks on this host\n"));
  EXPECT_THAT(text, HasSubstr("\njob b: 1 of 2 ranks on this host\n"));
  EXPECT_THAT(text, HasSubstr("    1     4712  shm               120       3 MiB       5 MiB       7 MiB\n  ranks 0,1, "
                              "step 31: waits in barrier#7 of world"));
}

TEST(Status, OneJsonObjectPerLine) {
  std::istringstream lines(status_text({rank_of("a \"b\"", 0), rank_of("a", 1)}, true));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto first = nlohmann::json::parse(line);
  EXPECT_EQ(first["job"], "a \"b\"");
  EXPECT_EQ(first["exchanges"], 120);
  EXPECT_EQ(first["step"], 31);
  EXPECT_EQ(first["operation"], "barrier#7 of world");
  EXPECT_EQ(first["waiting"], true);
  EXPECT_EQ(first["arena"]["resident_bytes"], 7 << 20);
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(nlohmann::json::parse(line)["rank"], 1);
  EXPECT_FALSE(std::getline(lines, line));
  EXPECT_EQ(status_text({}, true), "");
}

}  // namespace
}  // namespace lockstep::launcher::output
