// Injects disk errors and kills processes at every point of a save: the latest checkpoint, or the one before it, is
// always complete.
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

CheckpointParts make_parts(std::int64_t step) {
  return {{"model", {{"weight", torch::full({100}, static_cast<double>(step))}}}, {"trainer", {{"step", step}}}};
}

// Returns the step of the latest checkpoint that is complete to the last byte; 0 if there is none.
std::int64_t latest_step(const std::string& folder) {
  for (const auto& name : list_checkpoints(folder)) {
    try {
      const SavedCheckpoint checkpoint(folder + "/" + to_text(name));
      std::string damage;
      for (std::size_t i = 0; i < checkpoint.manifest().files.size(); ++i) damage += checkpoint.find_damage(i, true);
      if (!damage.empty()) continue;
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

// Returns the number of file operations of a save. `durable` is the number of the operation after which it is durable.
int num_operations(std::size_t& durable) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {1, 2}) checkpoints.save(step, make_parts(step));
  tests::record_file_operations();
  checkpoints.save(3, make_parts(3));
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
      for (const std::int64_t step : {1, 2}) checkpoints.save(step, make_parts(step));
      testing::internal::CaptureStderr();
      std::string message;
      tests::fail_file_operation(k, error);
      try {
        checkpoints.save(3, make_parts(3));
      } catch (const base::SystemError& failure) {
        message = failure.what();
        EXPECT_EQ(failure.cause(), base::Cause::kCkptWriteFailed);
        EXPECT_EQ(failure.error_number(), error);
      }
      tests::end_file_operations();
      const std::string warnings = testing::internal::GetCapturedStderr();
      if (static_cast<std::size_t>(k) <= durable)
        EXPECT_THAT(message, testing::MatchesRegex("checkpoint of step 3: rank 0: cannot .*: .*")) << k;
      else
        EXPECT_THAT(message, Eq("")) << k;
      EXPECT_TRUE(!message.empty() || !warnings.empty())
          << "operation " << k << " failed without an error or a warning";
      EXPECT_THAT(latest_step(folder.path()), message.empty() ? AnyOf(Eq(3), Eq(3)) : AnyOf(Eq(2), Eq(3)))
          << k << " " << message;
      checkpoints.save(4, make_parts(4));
      EXPECT_EQ(latest_step(folder.path()), 4);
      EXPECT_FALSE(has_temp_entries(folder.path())) << "a temporary entry was left by operation " << k;
      if (HasFailure()) return;
    }
}

TEST(SaveFaults, EverythingIsSyncedBeforeRename) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {1, 2}) checkpoints.save(step, make_parts(step));
  tests::record_file_operations();
  checkpoints.save(3, make_parts(3));
  tests::end_file_operations();
  // Files that were written and not flushed; directories with changed entries that were not flushed.
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
    EXPECT_FALSE(files.contains(path)) << operation << ": its bytes are not flushed before its name";
    const bool is_checkpoint = to.ends_with("-step-3");
    if (is_checkpoint) {
      EXPECT_TRUE(files.empty() && folders.empty()) << "some of its contents are not flushed before its name";
      EXPECT_THAT(manifest_before, HasSubstr("MANIFEST.json")) << "the manifest must be written last";
      published = true;
    } else if (to.find("/.lockstep-tmp-") != std::string::npos && path.find("-step-1") != std::string::npos) {
      EXPECT_TRUE(durable) << "an old checkpoint is removed before the new one is durable";
    }
    if (!published) manifest_before = to;
    folders.insert(fs::path(to).parent_path());
  }
  EXPECT_TRUE(published && durable);
}

// Runs `action` in a child process, which may be killed, and returns its status.
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
  EXPECT_EQ(::waitpid(child, &status, 0), child);  // bounded: the child ends by itself or was killed
  return status;
}

TEST(SaveFaults, KillAtEveryOperationKeepsACheckpoint) {
  // A forked child has only the calling thread, so the parent must not start threads: it creates no group.
  for (int k = 0, killed = 1; killed != 0; ++k) {
    const TempDir folder;
    const int status = run_in_child([&] {
      Checkpointer checkpoints(comm::init(), folder.path());
      for (const std::int64_t step : {1, 2}) checkpoints.save(step, make_parts(step));
      tests::fail_file_operation(k, 0);
      checkpoints.save(3, make_parts(3));
    });
    killed = WIFSIGNALED(status) ? 1 : 0;
    if (killed == 0) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      EXPECT_GT(k, 30);
    }
    EXPECT_THAT(latest_step(folder.path()), AnyOf(Eq(2), Eq(3))) << k;
    EXPECT_EQ(run_in_child([&] { Checkpointer(comm::init(), folder.path()).save(4, make_parts(4)); }), 0);
    EXPECT_EQ(latest_step(folder.path()), 4);
    EXPECT_FALSE(has_temp_entries(folder.path())) << k << ": a temporary entry of the killed process remains";
    if (HasFailure()) return;
  }
}

TEST(SaveFaults, KillAtRandomTimesKeepsACheckpoint) {
  const TempDir folder;
  const auto seed = std::random_device()();
  std::mt19937_64 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::int64_t before = 0;
  std::uint64_t longest = 60'000;  // microseconds; increased if the machine is too busy to save anything in this time
  for (int i = 0; i < 40; ++i) {
    run_in_child(
        [&] {
          Checkpointer checkpoints(comm::init(), folder.path());
          for (std::int64_t step = before + 1;; ++step) checkpoints.save(step, make_parts(step));
        },
        std::chrono::microseconds(1 + random() % longest));
    const std::int64_t now = latest_step(folder.path());
    ASSERT_GE(now, before) << "a durable checkpoint was lost";
    if (now == before) longest = std::min<std::uint64_t>(longest * 3 / 2, 1'000'000);
    before = now;
  }
  EXPECT_GT(before, 5) << "too few checkpoints were saved";
}

}  // namespace
}  // namespace lockstep::checkpoint
