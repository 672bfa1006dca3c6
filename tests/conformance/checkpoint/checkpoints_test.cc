// Tests checkpoints that all ranks write: they are atomic, all ranks get the same result, and an error on one rank is
// thrown on all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "tests/support/faulty_files.h"
#include "tests/support/rank_main.h"
#include "tests/support/shared_dir.h"

namespace lockstep::tests::checkpoints_test {
namespace {

using checkpoint::Checkpointer;
using checkpoint::CheckpointParts;
using checkpoint::SavedCheckpoint;
using checkpoint::value_of;
using testing::HasSubstr;

/// Returns the parts that this rank saves: its own part, and the model on rank 0.
CheckpointParts parts_of(std::int64_t step) {
  const int rank = world().rank();
  CheckpointParts parts = {
      {"own",
       {{"rank", std::int64_t{rank}}, {"noise", torch::full({50 + rank}, static_cast<double>(step * 100 + rank))}}}};
  if (rank == 0) parts["model"] = {{"weight", torch::full({1000}, static_cast<double>(step))}, {"step", step}};
  return parts;
}

/// Checks that this rank can read the parts of all ranks.
void expect_complete(const std::optional<SavedCheckpoint>& found, std::int64_t step) {
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step(), step);
  EXPECT_EQ(found->world_size(), world().size());
  EXPECT_EQ(value_of<std::int64_t>(found->read("model"), "step"), step);
  for (int rank = 0; rank < world().size(); ++rank) {
    const auto own = found->read("own", rank);
    EXPECT_EQ(value_of<std::int64_t>(own, "rank"), rank);
    EXPECT_TRUE(
        value_of<at::Tensor>(own, "noise").equal(torch::full({50 + rank}, static_cast<double>(step * 100 + rank))));
  }
}

TEST(Checkpoints, AllRanksLoadTheSameCheckpoint) {
  const SharedDir folder;
  Checkpointer checkpoints(world(), folder.path());
  EXPECT_FALSE(checkpoints.latest());
  for (const std::int64_t step : {10, 20, 30}) {
    const auto report = checkpoints.save(step, parts_of(step));
    EXPECT_EQ(world().all_gather_bytes(report.path),
              std::vector<std::string>(static_cast<std::size_t>(world().size()), report.path));
    expect_complete(checkpoints.latest(), step);
  }
}

TEST(Checkpoints, CheckpointWithMissingShardIsSkippedByAllRanks) {
  const SharedDir folder;
  Checkpointer checkpoints(world(), folder.path());
  checkpoints.save(10, parts_of(10));
  const std::string latest = checkpoints.save(20, parts_of(20)).path;
  if (world().rank() == 0)
    std::filesystem::remove(latest + "/" + checkpoint::part_file_name("own", world().size() - 1, "safetensors"));
  world().barrier();
  expect_complete(checkpoints.latest(), 10);
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.load(latest); }),
              HasSubstr("cannot load the checkpoint " + latest));
}

TEST(Checkpoints, DiskErrorOnOneRankIsThrownOnAll) {
  const SharedDir folder;
  Checkpointer checkpoints(world(), folder.path());
  checkpoints.save(10, parts_of(10));
  const int last = world().size() - 1;
  std::int64_t step = 10;
  for (int k = 0;; ++k) {
    step += 10;
    if (world().rank() == last) fail_file_operation(k, k % 2 == 0 ? EIO : ENOSPC);
    std::string message;
    try {
      checkpoints.save(step, parts_of(step));
    } catch (const base::SystemError& error) {
      message = error.what();
      EXPECT_EQ(error.cause(), base::Cause::kCkptWriteFailed);
      EXPECT_EQ(error.error_number(), k % 2 == 0 ? EIO : ENOSPC);
    }
    const int number = world().rank() == last ? end_file_operations() : 0;
    const auto all = world().all_gather_bytes(message);
    ASSERT_EQ(all, std::vector<std::string>(all.size(), all[0])) << "ranks got different results";
    if (!message.empty()) {
      EXPECT_THAT(message, HasSubstr("checkpoint of step " + std::to_string(step) + ": rank " + std::to_string(last) +
                                     ": cannot "));
    }
    const auto found = checkpoints.latest();
    ASSERT_TRUE(found);
    if (message.empty()) {
      EXPECT_EQ(found->step(), step) << k;
    }
    expect_complete(found, found->step());
    // Ends the loop when a save has no operation k. The lack of an error does not prove that: with one rank, some
    // operations follow after the checkpoint is durable, and their failure is not an error.
    const std::string at_the_end = world().broadcast_bytes(k >= number ? "yes" : "", last);
    if (at_the_end == "yes") break;
    ASSERT_LT(k, 200);
    if (HasFailure()) break;
  }
}

TEST(Checkpoints, AsyncSaveDuringTraining) {
  const SharedDir folder;
  Checkpointer checkpoints(world(), folder.path());
  const auto sum = torch::ones({1000});
  for (std::int64_t step = 1; step <= 40; ++step) {
    const auto gradient = torch::full({1000}, static_cast<double>(world().rank()));
    world().all_reduce(gradient);
    sum.add_(gradient);
    if (step % 10 == 0) checkpoints.save_async(step, {{"own", {{"sum", sum}}}});
    world().step();
  }
  ASSERT_TRUE(checkpoints.wait());
  const auto found = checkpoints.latest();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step(), 40);
  const double each = world().size() * (world().size() - 1) / 2.0;
  for (int rank = 0; rank < world().size(); ++rank)
    EXPECT_TRUE(value_of<at::Tensor>(found->read("own", rank), "sum").equal(torch::full({1000}, 1 + 40 * each)));
  EXPECT_TRUE(value_of<at::Tensor>(SavedCheckpoint(folder.path() + "/00000003-step-30").read("own"), "sum")
                  .equal(torch::full({1000}, 1 + 30 * each)));
}

TEST(Checkpoints, AsyncErrorIsThrownOnAllRanksByNextCall) {
  const SharedDir folder;
  Checkpointer checkpoints(world(), folder.path());
  CheckpointParts parts = parts_of(10);
  if (world().rank() == world().size() - 1) parts["own"]["bad"] = at::Tensor();
  checkpoints.save_async(10, parts);
  const auto message = message_of<base::UsageError>([&] { checkpoints.save_async(20, parts_of(20)); });
  EXPECT_THAT(message, HasSubstr("checkpoint of step 10: rank " + std::to_string(world().size() - 1) +
                                 ": cannot save the undefined tensor \"bad\""));
  EXPECT_FALSE(checkpoints.latest());
  checkpoints.save(30, parts_of(30));
  expect_complete(checkpoints.latest(), 30);
}

TEST(Checkpoints, FolderMissingOnOneRankIsAnErrorOnAll) {
  const SharedDir folder;
  Checkpointer checkpoints(world(), folder.path());
  checkpoints.save(10, parts_of(10));
  const std::string path = world().rank() == 0 ? folder.path() + "/00000001-step-10" : folder.path() + "/elsewhere";
  if (world().size() == 1) return;
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.load(path); }),
              HasSubstr("elsewhere/MANIFEST.json: No such file or directory"));
}

// A job of its own, because the error closes the group.
TEST(CheckpointsFailures, DesyncIsDetectedWithWriterThread) {
  std::optional<TempDir> dir;
  if (world().rank() == 0) dir.emplace();
  Checkpointer checkpoints(world(), world().broadcast_bytes(dir ? dir->path() : "", 0));
  comm::Group part = world().split(0);
  checkpoints.save_async(10, parts_of(10));
  checkpoints.wait();
  const auto begin = std::chrono::steady_clock::now();
  const auto message = message_of<base::DesyncError>(
      [&] { world().rank() == 0 ? world().barrier() : part.all_reduce(torch::ones({4})); });
  EXPECT_THAT(message, HasSubstr("rank 0 called barrier(), rank 1 called all_reduce(float32[4])"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5))
      << "before the deadline of the operation";
}

}  // namespace
}  // namespace lockstep::tests::checkpoints_test
