// Tests of the choice of a run's directory.
#include "lockstep/train/loggers/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using training::open_run_directory;
using training::RunDirectory;
using training::RunDirectoryOptions;

TEST(RunDirectory, NewRunGetsTheNextNumber) {
  const TempDir dir;
  const RunDirectoryOptions options{.folder = dir / "runs", .name = "net", .job = "a"};
  EXPECT_EQ(open_run_directory(options).path, dir / "runs/net");
  EXPECT_EQ(open_run_directory(options).path, dir / "runs/net-2");
  for (const char* other :
       {"runs/net-02", "runs/net-7b", "runs/net-", "runs/nets", "runs/net-99999999999999999999", "runs/other-9"})
    std::filesystem::create_directory(dir / other);
  const RunDirectory third = open_run_directory(options);
  EXPECT_EQ(third.path, dir / "runs/net-3") << "directories with other names do not count";
  EXPECT_FALSE(third.is_resumed);
}

TEST(RunDirectory, ResumesTheHighestNumber) {
  const TempDir dir;
  const RunDirectoryOptions options{.folder = dir.path(), .name = "net", .resume_newest = true, .job = "a"};
  EXPECT_FALSE(open_run_directory(options).is_resumed) << "there is no run yet";
  std::filesystem::create_directory(dir / "net-9");
  std::filesystem::create_directory(dir / "net-10");
  const RunDirectory run = open_run_directory(options);
  EXPECT_EQ(run.path, dir / "net-10");
  EXPECT_TRUE(run.is_resumed);
}

TEST(RunDirectory, RestartedJobReusesItsDirectory) {
  const TempDir dir;
  const auto options = [&](const std::string& job, int generation) {
    return RunDirectoryOptions{.folder = dir.path(), .name = "net", .job = job, .generation = generation};
  };
  EXPECT_FALSE(open_run_directory(options("a", 1)).is_resumed) << "its first start created no directory";
  EXPECT_EQ(open_run_directory(options("b", 0)).path, dir / "net-2");
  const RunDirectory again = open_run_directory(options("a", 2));
  EXPECT_EQ(again.path, dir / "net");
  EXPECT_TRUE(again.is_resumed);
  // A job that resumes in the directory of another job owns it from then on.
  EXPECT_EQ(open_run_directory({.folder = dir.path(), .name = "net", .resume_newest = true, .job = "c"}).path,
            dir / "net-2");
  EXPECT_EQ(open_run_directory(options("c", 1)).path, dir / "net-2");
  EXPECT_EQ(open_run_directory(options("b", 1)).path, dir / "net-3");
}

TEST(RunDirectory, ConcurrentRunsGetDifferentDirectories) {
  const TempDir dir;
  std::vector<std::string> paths(8);
  std::vector<std::thread> threads;
  for (std::string& path : paths)
    threads.emplace_back([&] { path = open_run_directory({.folder = dir.path(), .name = "net", .job = "a"}).path; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<std::string>(paths.begin(), paths.end()).size(), paths.size());
}

TEST(RunDirectory, NamesADirectoryThatCannotBeCreated) {
  const TempDir dir;
  dir.write("file", "");
  EXPECT_THAT(tests::message_of<base::SystemError>(
                  [&] { open_run_directory({.folder = dir / "file/runs", .name = "net", .job = "a"}); }),
              ::testing::HasSubstr("file/runs"));
}

}  // namespace
}  // namespace lockstep::tests
