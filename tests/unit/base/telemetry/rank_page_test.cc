#include "lockstep/base/telemetry/rank_page.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <tuple>

namespace lockstep::base {
namespace {

TEST(RankPage, IsSeenAsItWasWritten) {
  EXPECT_FALSE(look_at_rank(::getpid()));
  show_process(3, 4, "job\n\x1b[31m" + std::string(100, 'x'), "shm");
  RankPage::process().exchanges = 7;
  RankPage::process().arena.resident = std::uint64_t{5} << 40;
  const auto seen = look_at_rank(::getpid());
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->pid, ::getpid());
  EXPECT_EQ(seen->rank, 3);
  EXPECT_EQ(seen->world_size, 4);
  EXPECT_EQ(seen->job, "job??[31m" + std::string(54, 'x'));  // cut, and without what a terminal would obey
  EXPECT_EQ(seen->transport, "shm");
  EXPECT_EQ(seen->exchanges, 7u);
  EXPECT_EQ(seen->resident_bytes, std::uint64_t{5} << 40);
}

TEST(RankPage, OperationsAreSeenWithTheirTimes) {
  show_process(0, 1, "job", "self");
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  const auto before = now();
  FlightRing& flight = RankPage::process().flight;
  flight.end(flight.begin({.seq = 1, .kind = "barrier"}));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that the counter's rate is known
  flight.begin({.seq = 2, .kind = "all_reduce"});
  const auto seen = look_at_rank(::getpid());
  ASSERT_TRUE(seen);
  ASSERT_EQ(seen->operations.size(), 2u);
  const auto& [first, second] = std::tie(seen->operations[0], seen->operations[1]);
  constexpr std::int64_t kMillisecond = 1000000;
  EXPECT_GT(first.begun, before - kMillisecond);
  EXPECT_GE(first.ended, first.begun);
  EXPECT_GT(second.begun, first.ended + 19 * kMillisecond);
  EXPECT_LT(second.begun, seen->looked_ns + kMillisecond);
  EXPECT_TRUE(second.goes_on());
}

TEST(RankPage, TimesThatCannotBeAreNoMatter) {
  const SharedMemory memory = make_rank_page();
  RankPage& page = page_in(memory);
  std::memcpy(page.magic, RankPage::kMagic, sizeof page.magic);
  page.shown_ticks = INT64_MIN;
  page.shown_ns = INT64_MAX;
  page.flight.end(page.flight.begin({.seq = 1, .kind = "barrier"}));
  const auto seen = look_at_page(memory);
  ASSERT_TRUE(seen);
  ASSERT_EQ(seen->operations.size(), 1u);
  for (const FlightSeen& operation : seen->operations) {
    EXPECT_GE(operation.begun, 0);
    EXPECT_LE(operation.begun, seen->looked_ns);
    EXPECT_LE(operation.ended, seen->looked_ns);
  }
}

TEST(RankPage, AChildOfARankIsNone) {
  show_process(0, 1, "job", "self");
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    RankPage::process().exchanges += 1;  // must not fault
    char byte = 0;
    ::_exit(::read(go[0], &byte, 1) == 1 ? 0 : 1);
  }
  EXPECT_FALSE(look_at_rank(child));
  EXPECT_EQ(::write(go[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_FALSE(look_at_rank(child));  // it has ended
  ::close(go[0]);
  ::close(go[1]);
}

}  // namespace
}  // namespace lockstep::base
