// Disks that fail and processes that are killed, at every point of a save: the newest checkpoint, or the one before, is
// always whole.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/init.h"
#include "tests/support/faulty_files.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AnyOf;
using testing::Eq;
using testing::HasSubstr;
using tests::TempDir;

CheckpointParts parts_of(std::int64_t step) {
  return {{"model", {{"weight", torch::full({100}, static_cast<double>(step))}}}, {"trainer", {{"step", step}}}};
}

// The step of the newest checkpoint that is whole to the last byte; 0 for none.
std::int64_t newest_step(const std::string& folder) {
  for (const auto& name : list_checkpoints(folder)) {
    try {
      const SavedCheckpoint checkpoint(folder + "/" + to_text(name));
      std::string complaint;
      for (std::size_t i = 0; i < checkpoint.manifest().files.size(); ++i) complaint += checkpoint.complaint(i, true);
      if (!complaint.empty()) continue;
      const auto step = value_of<std::int64_t>(checkpoint.read("trainer"), "step");
      EXPECT_EQ(step, checkpoint.step());
      EXPECT_TRUE(value_of<at::Tensor>(checkpoint.read("model"), "weight")
                      .equal(torch::full({100}, static_cast<double>(step))));
      return step;
    } catch (const base::Error&) {
    }
  }
  return 0;
}

bool has_temp_entries(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with(".lockstep-tmp-")) return true;
  return false;
}

// What a save does, from its beginning; and the number of the operation by which it is durable.
int num_operations(std::size_t& durable) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {1, 2}) checkpoints.save(step, parts_of(step));
  tests::record_file_operations();
  checkpoints.save(3, parts_of(3));
  const int number = tests::end_file_operations();
  const auto operations = tests::file_operations();
  durable = 1 + static_cast<std::size_t>(std::find_if(operations.begin(), operations.end(),
                                                      [](const auto& text) { return text.ends_with("-step-3"); }) -
                                         operations.begin());
  return number;
}

TEST(SaveFaults, EveryFailedOperationIsReportedAndKeepsACheckpoint) {
  std::size_t durable = 0;
  const int number = num_operations(durable);
  ASSERT_GT(number, 30);
  ASSERT_LT(durable, static_cast<std::size_t>(number));
  for (const int error : {EIO, ENOSPC})
    for (int k = 0; k < number; ++k) {
      const TempDir folder;
      Checkpointer checkpoints(comm::init(), folder.path());
      for (const std::int64_t step : {1, 2}) checkpoints.save(step, parts_of(step));
      testing::internal::CaptureStderr();
      std::string said;
      tests::fail_file_operation(k, error);
      try {
        checkpoints.save(3, parts_of(3));
      } catch (const base::SystemError& failure) {
        said = failure.what();
        EXPECT_EQ(failure.cause(), base::Cause::kCkptWriteFailed);
        EXPECT_EQ(failure.error_number(), error);
      }
      tests::end_file_operations();
      const std::string warned = testing::internal::GetCapturedStderr();
      if (static_cast<std::size_t>(k) <= durable)
        EXPECT_THAT(said, testing::MatchesRegex("checkpoint of step 3: rank 0: cannot .*: .*")) << k;
      else
        EXPECT_THAT(said, Eq("")) << k;
      EXPECT_TRUE(!said.empty() || !warned.empty()) << "operation " << k << " failed in silence";
      EXPECT_THAT(newest_step(folder.path()), said.empty() ? AnyOf(Eq(3), Eq(3)) : AnyOf(Eq(2), Eq(3)))
          << k << " " << said;
      checkpoints.save(4, parts_of(4));
      EXPECT_EQ(newest_step(folder.path()), 4);
      EXPECT_FALSE(has_temp_entries(folder.path())) << "something half made was left by operation " << k;
      if (HasFailure()) return;
    }
}

TEST(SaveFaults, EverythingIsSyncedBeforeRename) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {1, 2}) checkpoints.save(step, parts_of(step));
  tests::record_file_operations();
  checkpoints.save(3, parts_of(3));
  tests::end_file_operations();
  // Files that were written and not brought to the disk; folders likewise, when a name in them has changed.
  std::set<std::string> files, folders;
  bool published = false, durable = false;
  std::string manifest_before;
  for (const auto& operation : tests::file_operations()) {
    std::istringstream words(operation);
    std::string what, path, to;
    words >> what >> path >> to;
    if (what == "pwrite") files.insert(path);
    if (what == "fsync") {
      files.erase(path);
      folders.erase(path);
      durable = durable || (published && path == folder.path());
    }
    if (what != "renameat") continue;
    EXPECT_FALSE(files.contains(path)) << operation << ": its bytes may come later than its name";
    const bool is_checkpoint = to.ends_with("-step-3");
    if (is_checkpoint) {
      EXPECT_TRUE(files.empty() && folders.empty()) << "something of it may come later than its name";
      EXPECT_THAT(manifest_before, HasSubstr("MANIFEST.json")) << "the manifest is the last";
      published = true;
    } else if (to.find("/.lockstep-tmp-") != std::string::npos && path.find("-step-1") != std::string::npos) {
      EXPECT_TRUE(durable) << "an old one goes before the new one is durable";
    }
    if (!published) manifest_before = to;
    folders.insert(fs::path(to).parent_path());
  }
  EXPECT_TRUE(published && durable);
}

// Runs `save` in a child, which may be killed; returns its status.
template <typename Action>
int run_in_child(Action action, std::chrono::microseconds kill_after = {}) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      action();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  if (kill_after.count() > 0) {
    std::this_thread::sleep_for(kill_after);
    ::kill(child, SIGKILL);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);  // bounded: the child ends by itself, or was killed
  return status;
}

TEST(SaveFaults, KillAtEveryOperationKeepsACheckpoint) {
  // The parent must not have threads that a child lacks: it makes no group.
  for (int k = 0, killed = 1; killed != 0; ++k) {
    const TempDir folder;
    const int status = run_in_child([&] {
      Checkpointer checkpoints(comm::init(), folder.path());
      for (const std::int64_t step : {1, 2}) checkpoints.save(step, parts_of(step));
      tests::fail_file_operation(k, 0);
      checkpoints.save(3, parts_of(3));
    });
    killed = WIFSIGNALED(status) ? 1 : 0;
    if (killed == 0) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      EXPECT_GT(k, 30);
    }
    EXPECT_THAT(newest_step(folder.path()), AnyOf(Eq(2), Eq(3))) << k;
    EXPECT_EQ(run_in_child([&] { Checkpointer(comm::init(), folder.path()).save(4, parts_of(4)); }), 0);
    EXPECT_EQ(newest_step(folder.path()), 4);
    EXPECT_FALSE(has_temp_entries(folder.path())) << k << ": a part of a dead process stays";
    if (HasFailure()) return;
  }
}

TEST(SaveFaults, KillAtRandomTimesKeepsACheckpoint) {
  const TempDir folder;
  const auto seed = std::random_device()();
  std::mt19937_64 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::int64_t before = 0;
  std::uint64_t longest = 60'000;  // microseconds; more on a machine so busy that nothing is saved by then
  for (int i = 0; i < 40; ++i) {
    run_in_child(
        [&] {
          Checkpointer checkpoints(comm::init(), folder.path());
          for (std::int64_t step = before + 1;; ++step) checkpoints.save(step, parts_of(step));
        },
        std::chrono::microseconds(1 + random() % longest));
    const std::int64_t now = newest_step(folder.path());
    ASSERT_GE(now, before) << "a checkpoint that was there is gone";
    if (now == before) longest = std::min<std::uint64_t>(longest * 3 / 2, 1'000'000);
    before = now;
  }
  EXPECT_GT(before, 5) << "hardly anything was saved";
}

}  // namespace
}  // namespace lockstep::checkpoint
