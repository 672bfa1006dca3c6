#include "lockstep/job/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::Deadline;
using ::testing::Each;
using ::testing::HasSubstr;

struct RankSpec {
  int rank;
  int size;
  Facts facts = {{"library", "1"}};
};

struct JoinResult {
  identity::Identity identity;
  Cause cause = Cause::kInternal;
  std::string text;  // empty if the rank joined
};

/// Lets all ranks join concurrently, one thread per rank, through one store.
std::vector<JoinResult> join_all(const std::vector<RankSpec>& ranks, std::chrono::milliseconds limit = 10s,
                                 LocalStore* table = nullptr) {
  LocalStore own;
  LocalStore& store = table ? *table : own;
  std::vector<JoinResult> results(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      results[i].identity.rank = ranks[i].rank;
      results[i].identity.world_size = ranks[i].size;
      try {
        join(store, results[i].identity, ranks[i].facts, Deadline::in(limit));
      } catch (const base::Error& error) {
        results[i].cause = error.cause();
        results[i].text = error.what();
        // As init() does: this ends the waits of the other ranks.
        if (error.cause() != Cause::kJoinTimeout)
          publish_cause(store, {.cause = error.cause(), .rank = ranks[i].rank, .detail = error.what()});
      }
    });
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Join, FillsHostLayoutOfOneHost) {
  const auto results = join_all({{2, 3}, {0, 3}, {1, 3}});
  for (const JoinResult& result : results) {
    EXPECT_EQ(result.text, "");
    EXPECT_EQ(result.identity.local_rank, result.identity.rank);
    EXPECT_EQ(result.identity.local_world_size, 3);
    EXPECT_EQ(result.identity.node_rank, 0);
    EXPECT_EQ(result.identity.num_nodes, 1);
    EXPECT_THAT(result.identity.host_indices, Each(0));
    EXPECT_EQ(result.identity.host_indices.size(), 3U);
  }
}

TEST(Join, MissingRanksAreListed) {
  const auto results = join_all({{0, 5}, {3, 5}}, 300ms);
  for (const JoinResult& result : results) {
    EXPECT_EQ(result.cause, Cause::kJoinTimeout);
    EXPECT_EQ(result.text, "3 of 5 ranks did not join in time: 1, 2, 4");
  }
}

TEST(Join, MismatchIsReportedOnEveryRank) {
  const auto results = join_all({{0, 3}, {1, 3}, {2, 3, {{"library", "2"}}}});
  for (const JoinResult& result : results) {
    EXPECT_EQ(result.cause, Cause::kConfigMismatch);
    EXPECT_THAT(result.text, HasSubstr("rank 2 differs from rank 0 in library: \"2\" on "));
    EXPECT_THAT(result.text, HasSubstr(", but \"1\" on "));
  }
}

TEST(Join, DifferentArgumentsAreAWarning) {
  LocalStore store;
  store.set("join/1", "beta\nid\n77\narguments=--lr\t0.2\nlibrary=1\nworld_size=2", Deadline::in(1s));
  identity::Identity id{.rank = 0, .world_size = 2};
  ::testing::internal::CaptureStderr();
  join(store, id, {{"library", "1"}}, Deadline::in(1s));
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr(
          "lockstep: warning: rank 1 was started with different arguments than rank 0: \"--lr\" \"0.2\" instead of "));
}

TEST(Join, DifferentWorldSizesAreAMismatch) {
  // Rank 0 expects two ranks and finds both. Rank 1 waits for a third rank until rank 0 publishes the mismatch.
  const auto begin = Deadline::Clock::now();
  for (const JoinResult& result : join_all({{0, 2}, {1, 3}})) {
    EXPECT_EQ(result.cause, Cause::kConfigMismatch);
    EXPECT_THAT(result.text, HasSubstr("rank 1 differs from rank 0 in world_size: \"3\" on "));
  }
  EXPECT_LT(Deadline::Clock::now() - begin, 5s);
}

TEST(Join, PublishedCauseEndsTheWait) {
  LocalStore store;
  publish_cause(store, {.cause = Cause::kResource, .rank = 1, .detail = "no memory"});
  const auto results = join_all({{0, 2}}, 10s, &store);
  EXPECT_EQ(results[0].cause, Cause::kResource);
  EXPECT_EQ(results[0].text, "no memory");
}

TEST(Join, DuplicateRankIsRejected) {
  LocalStore store;
  store.set("join/1", "beta\nid\n77\nlibrary=1", Deadline::in(1s));
  const auto begin = Deadline::Clock::now();
  const auto results = join_all({{0, 3}, {1, 3}}, 10s, &store);
  for (const JoinResult& result : results) {
    EXPECT_EQ(result.cause, Cause::kBadArg);
    EXPECT_THAT(result.text, HasSubstr("rank 1 joined twice: from host beta pid 77 and from host "));
  }
  EXPECT_LT(Deadline::Clock::now() - begin, 5s);
}

TEST(Join, HostsWithEqualNamesAreDistinguished) {
  LocalStore store;
  identity::Identity id{.rank = 0, .world_size = 3};
  store.set("join/1", base::net::host_name() + "\nanother machine\n1\nlibrary=1\nworld_size=3", Deadline::in(1s));
  store.set("join/2", base::net::host_name() + "\nanother machine\n2\nlibrary=1\nworld_size=3", Deadline::in(1s));
  join(store, id, {{"library", "1"}}, Deadline::in(1s));
  EXPECT_EQ(id.local_rank, 0);
  EXPECT_EQ(id.local_world_size, 1);
  EXPECT_EQ(id.node_rank, 0);
  EXPECT_EQ(id.num_nodes, 2);
  EXPECT_EQ(store.find("join/roster", Deadline::in(1s)), "0*1,1*2");
}

TEST(Join, OtherRanksReadWhatRankZeroHasFound) {
  for (const std::string roster : {"0*1,1*2,0*1", "0*1,1*2", "0*5", "0*1,1*0,1*2", "x", "", "0*1,-1*3"}) {
    LocalStore store;
    identity::Identity id{.rank = 3, .world_size = 4};
    store.set("join/0", base::net::host_name() + "\nthis\n1\nlibrary=1\nworld_size=4", Deadline::in(1s));
    store.set("join/roster", roster.empty() ? "," : roster, Deadline::in(1s));
    if (roster != "0*1,1*2,0*1") {
      EXPECT_THROW(join(store, id, {{"library", "1"}}, Deadline::in(1s)), base::Error) << roster;
      continue;
    }
    join(store, id, {{"library", "1"}}, Deadline::in(1s));
    EXPECT_EQ(id.host_indices, (std::vector<int>{0, 1, 1, 0}));
    EXPECT_EQ(id.local_ranks, (std::vector<int>{0, 3}));
    EXPECT_EQ(id.local_rank, 1);
    EXPECT_EQ(id.node_rank, 0);
    EXPECT_EQ(id.num_nodes, 2);
  }
}

TEST(Join, LauncherValuesAreKept) {
  LocalStore store;
  identity::Identity id{
      .rank = 0, .world_size = 1, .local_rank = 3, .local_world_size = 4, .node_rank = 5, .num_nodes = 6};
  join(store, id, {}, Deadline::in(1s));
  EXPECT_EQ(id.local_rank, 3);
  EXPECT_EQ(id.num_nodes, 6);
}

TEST(Join, ProgramHasABuildId) {
  const std::string id = build_id("");
  EXPECT_EQ(id, build_id(""));
  if (id != "-") {
    EXPECT_GE(id.size(), 16u);
    EXPECT_THAT(id, Each(::testing::AnyOf(::testing::AllOf(::testing::Ge('0'), ::testing::Le('9')),
                                          ::testing::AllOf(::testing::Ge('a'), ::testing::Le('f')))));
  }
}

TEST(BuildId, OfProgramAndLibraries) {
  EXPECT_EQ(build_id("").size(), 40u);
  EXPECT_EQ(build_id("libc.so.6").size(), 40u);
  EXPECT_NE(build_id(""), build_id("libc.so.6"));
  EXPECT_EQ(build_id("libnothing.so"), "-");
}

}  // namespace
}  // namespace lockstep::job
