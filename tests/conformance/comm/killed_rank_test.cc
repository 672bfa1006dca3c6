// Tests that the death of a rank is reported to the other ranks and by the launcher (docs/reference/fatal-causes.md).
#include <gmock/gmock.h>

#include "tests/support/lockstep_run.h"

namespace lockstep::tests::killed_rank_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(KilledRank, IsReportedToOtherRanksAndByLauncher) {
  for (const int ranks : {2, 3}) {
    const ProcessResult exit =
        run_process(lockstep_run({"-n", std::to_string(ranks), "--bind", "none", "--fail-grace", "8",
                                  LOCKSTEP_CASES_PATH, "--gtest_filter=Killed.LastRankIsKilled"}),
                    60s);
    EXPECT_EQ(exit.code, 137);
    const job::Fatal fatal = fatal_in(exit.err);
    EXPECT_EQ(fatal.cause, base::Cause::kRankDied);
    EXPECT_EQ(fatal.rank, ranks - 1);
    EXPECT_THAT(fatal.detail, StartsWith("killed by SIGKILL"));
    for (int r = 0; r + 1 < ranks; ++r)
      EXPECT_THAT(exit.out, HasSubstr("[" + std::to_string(r) + "] peer lost: all_reduce#")) << exit.err;
    EXPECT_LT(exit.elapsed, 10s);
  }
}

}  // namespace
}  // namespace lockstep::tests::killed_rank_test
