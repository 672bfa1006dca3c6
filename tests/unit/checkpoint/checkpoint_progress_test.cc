#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/init.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

TEST(CheckpointProgress, RankPageHasSequenceOfLatestDurableCheckpoint) {
  const tests::TempDir folder;
  const auto parts = [](const char* name) { return CheckpointParts{{name, {{"step", std::int64_t{1}}}}}; };
  const auto& saved = base::telemetry::RankPage::this_process().durable_checkpoint;
  {
    Checkpointer checkpoints(comm::init(), folder.path());
    EXPECT_EQ(saved, 0);
    checkpoints.save(70, parts("trainer"));
    EXPECT_EQ(saved, 1);
    checkpoints.save_async(80, parts("trainer"));
    checkpoints.wait();
    EXPECT_EQ(saved, 2);
    EXPECT_THROW(checkpoints.save(90, parts("no/name")), base::UsageError);
    EXPECT_EQ(saved, 2);
  }
  Checkpointer again(comm::init(), folder.path());
  again.save(75, parts("trainer"));  // a job that continued from step 70 saves a lower step than before
  EXPECT_EQ(saved, 3);
}

}  // namespace
}  // namespace lockstep::checkpoint
