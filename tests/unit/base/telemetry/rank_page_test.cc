#include "lockstep/base/telemetry/rank_page.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <thread>
#include <tuple>

namespace lockstep::base::telemetry {
namespace {

TEST(RankPage, ReadsBackWhatWasPublished) {
  EXPECT_FALSE(find_rank_page(::getpid()));
  publish_to(RankPage::this_process(),
             {.rank = 3, .world_size = 4, .job = "job\n\x1b[31m" + std::string(100, 'x'), .transport = "shm"});
  RankPage::this_process().gradient_reductions = 7;
  RankPage::this_process().arena.resident = std::uint64_t{5} << 40;
  const auto seen = find_rank_page(::getpid());
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->pid, ::getpid());
  EXPECT_EQ(seen->rank, 3);
  EXPECT_EQ(seen->world_size, 4);
  EXPECT_EQ(seen->job, "job??[31m" + std::string(55, 'x'));  // truncated and printable
  EXPECT_EQ(seen->transport, "shm");
  EXPECT_EQ(seen->gradient_reductions, 7u);
  EXPECT_EQ(seen->resident_bytes, std::uint64_t{5} << 40);
}

TEST(RankPage, ReaderSeesWholeIdentityOrNone) {
  for (int i = 0; i < 20; ++i) {
    const SharedMemory memory = create_rank_page();
    RankPage& page = rank_page_in(memory);
    std::thread rank([&] { publish_to(page, {.rank = 5, .world_size = 6, .job = "a job", .transport = "shm"}); });
    std::optional<RankSnapshot> seen;
    while (!(seen = read_rank_page(page))) std::this_thread::yield();
    rank.join();
    EXPECT_EQ(seen->rank, 5);
    EXPECT_EQ(seen->world_size, 6);
    EXPECT_EQ(seen->job, "a job");
    EXPECT_EQ(seen->transport, "shm");
  }
}

TEST(RankPage, ReadsOperationsWithTimes) {
  publish_to(RankPage::this_process(), {.job = "job", .transport = "self"});
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  const auto before = now();
  FlightRing& flight = RankPage::this_process().flight;
  flight.end(flight.begin({.seq = 1, .kind = "barrier"}));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that the rate of the counter can be measured
  flight.begin({.seq = 2, .kind = "all_reduce"});
  const auto seen = find_rank_page(::getpid());
  ASSERT_TRUE(seen);
  ASSERT_EQ(seen->operations.size(), 2u);
  const auto& [first, second] = std::tie(seen->operations[0], seen->operations[1]);
  constexpr std::int64_t kMillisecond = 1000000;
  EXPECT_GT(first.started, before - kMillisecond);
  EXPECT_GE(first.ended, first.started);
  EXPECT_GT(second.started, first.ended + 19 * kMillisecond);
  EXPECT_LT(second.started, seen->read_at_ns + kMillisecond);
  EXPECT_TRUE(second.is_running());
}

TEST(RankPage, ImpossibleTimesAreClamped) {
  const SharedMemory memory = create_rank_page();
  RankPage& page = rank_page_in(memory);
  page.magic = RankPage::kMagic;
  page.published_ticks = INT64_MIN;
  page.published_ns = INT64_MAX;
  page.flight.end(page.flight.begin({.seq = 1, .kind = "barrier"}));
  const auto seen = read_rank_page(page);
  ASSERT_TRUE(seen);
  ASSERT_EQ(seen->operations.size(), 1u);
  for (const OperationRecord& operation : seen->operations) {
    EXPECT_GE(operation.started, 0);
    EXPECT_LE(operation.started, seen->read_at_ns);
    EXPECT_LE(operation.ended, seen->read_at_ns);
  }
}

TEST(RankPage, ChildOfARankIsNotARank) {
  publish_to(RankPage::this_process(), {.job = "job", .transport = "self"});
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    RankPage::this_process().gradient_reductions += 1;  // must not fault
    char byte = 0;
    ::_exit(::read(go[0], &byte, 1) == 1 ? 0 : 1);
  }
  EXPECT_FALSE(find_rank_page(child));
  EXPECT_EQ(::write(go[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_FALSE(find_rank_page(child));  // it has ended
  ::close(go[0]);
  ::close(go[1]);
}

}  // namespace
}  // namespace lockstep::base::telemetry
