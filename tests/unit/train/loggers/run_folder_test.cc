// Which folder a run has.
#include "lockstep/train/loggers/run_folder.h"

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

using train::open_run_folder;
using train::RunFolder;
using train::RunFolderOptions;

TEST(RunFolder, NewRunGetsTheNextNumber) {
  const TempDir dir;
  const RunFolderOptions options{.folder = dir / "runs", .name = "net", .job = "a"};
  EXPECT_EQ(open_run_folder(options).path, dir / "runs/net");
  EXPECT_EQ(open_run_folder(options).path, dir / "runs/net-2");
  for (const char* other :
       {"runs/net-02", "runs/net-7b", "runs/net-", "runs/nets", "runs/net-99999999999999999999", "runs/other-9"})
    std::filesystem::create_directory(dir / other);
  const RunFolder third = open_run_folder(options);
  EXPECT_EQ(third.path, dir / "runs/net-3") << "after folders of other names";
  EXPECT_FALSE(third.is_resumed);
}

TEST(RunFolder, ResumesTheHighestNumber) {
  const TempDir dir;
  const RunFolderOptions options{.folder = dir.path(), .name = "net", .newest = true, .job = "a"};
  EXPECT_FALSE(open_run_folder(options).is_resumed) << "there is none";
  std::filesystem::create_directory(dir / "net-9");
  std::filesystem::create_directory(dir / "net-10");
  const RunFolder run = open_run_folder(options);
  EXPECT_EQ(run.path, dir / "net-10");
  EXPECT_TRUE(run.is_resumed);
}

TEST(RunFolder, RestartedJobReusesItsFolder) {
  const TempDir dir;
  const auto options = [&](const std::string& job, int generation) {
    return RunFolderOptions{.folder = dir.path(), .name = "net", .job = job, .generation = generation};
  };
  EXPECT_FALSE(open_run_folder(options("a", 1)).is_resumed) << "its first start has come to no folder";
  EXPECT_EQ(open_run_folder(options("b", 0)).path, dir / "net-2");
  const RunFolder again = open_run_folder(options("a", 2));
  EXPECT_EQ(again.path, dir / "net");
  EXPECT_TRUE(again.is_resumed);
  // Who goes on in another's folder has it from then on.
  EXPECT_EQ(open_run_folder({.folder = dir.path(), .name = "net", .newest = true, .job = "c"}).path, dir / "net-2");
  EXPECT_EQ(open_run_folder(options("c", 1)).path, dir / "net-2");
  EXPECT_EQ(open_run_folder(options("b", 1)).path, dir / "net-3");
}

TEST(RunFolder, ConcurrentRunsGetDifferentFolders) {
  const TempDir dir;
  std::vector<std::string> paths(8);
  std::vector<std::thread> threads;
  for (std::string& path : paths)
    threads.emplace_back([&] { path = open_run_folder({.folder = dir.path(), .name = "net", .job = "a"}).path; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<std::string>(paths.begin(), paths.end()).size(), paths.size());
}

TEST(RunFolder, NamesAFolderThatCannotBeCreated) {
  const TempDir dir;
  dir.write("file", "");
  try {
    open_run_folder({.folder = dir / "file/runs", .name = "net", .job = "a"});
    FAIL();
  } catch (const base::SystemError& error) {
    EXPECT_NE(std::string(error.what()).find("file/runs"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::tests
