#include "lockstep/checkpoint/files/folder_lock.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint::files {
namespace {

using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

constexpr FolderLockOptions kQuick{.beat = std::chrono::milliseconds(50)};

/// Runs `action` in a forked process and returns its exit code.
int in_child(const std::function<int()>& action) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(action());
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// 1 if the folder is in use, 0 if this process could lock it.
int try_lock(const std::string& folder) {
  try {
    const FolderLock lock(folder, kQuick);
    return 0;
  } catch (const base::UsageError& error) {
    return error.cause() == base::Cause::kFolderInUse ? 1 : 2;
  }
}

TEST(FolderLock, OneProcessAtATime) {
  const TempDir folder;
  {
    const FolderLock lock(folder.path(), kQuick);
    const FolderLock again(folder.path(), kQuick);  // this process may have several
    EXPECT_EQ(in_child([&] { return try_lock(folder.path()); }), 1);
    again.check();
  }
  EXPECT_EQ(folder.num_entries(), 0u) << "the file is removed";
  EXPECT_EQ(in_child([&] { return try_lock(folder.path()); }), 0);
}

/// A process that holds the lock of a folder until it is told to end.
class OtherHolder {
 public:
  explicit OtherHolder(const std::string& folder) {
    base::Pipe ready = base::make_pipe(), end = base::make_pipe();
    pid_ = ::fork();
    if (pid_ == 0) {
      end.write.reset();
      const FolderLock lock(folder, kQuick);
      char byte = 0;
      if (::write(ready.write.get(), "x", 1) != 1) ::_exit(1);
      ::_exit(::read(end.read.get(), &byte, 1) == 0 ? 0 : 1);
    }
    char byte = 0;
    EXPECT_EQ(::read(ready.read.get(), &byte, 1), 1);
    end_ = std::move(end.write);
  }
  ~OtherHolder() { kill(); }
  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  base::Fd end_;
};

TEST(FolderLock, NamesTheHolderAndFollowsAKilledOneAtOnce) {
  const TempDir folder;
  OtherHolder other(folder.path());
  const FolderLockOptions slow{.beat = std::chrono::minutes(5)};  // a takeover that waits would not end
  EXPECT_THAT(message_of<base::UsageError>([&] { const FolderLock lock(folder.path(), slow); }),
              HasSubstr("is in use by another training: process " + std::to_string(other.pid()) + " on "));
  other.kill();
  const FolderLock lock(folder.path(), slow);
  lock.check();
}

TEST(FolderLock, AForkedChildDoesNotReleaseIt) {
  const TempDir folder;
  auto lock = std::make_unique<FolderLock>(folder.path(), kQuick);
  EXPECT_EQ(in_child([&] {
              lock.reset();
              return 7;
            }),
            7);
  lock->check();
  EXPECT_EQ(in_child([&] { return try_lock(folder.path()); }), 1);
}

constexpr const char* kForeign = "beta\nanother-kernel\n4711\nnight-run\n2\n";

TEST(FolderLock, OfAnotherHostIsTakenOverWhenItIsNoLongerRenewed) {
  const TempDir folder;
  folder.write("LOCK", kForeign);
  testing::internal::CaptureStderr();
  const FolderLock lock(folder.path(), kQuick);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("process 4711 on beta, job night-run has not renewed its lock"));
}

TEST(FolderLock, OfAnotherHostThatIsRenewedHolds) {
  const TempDir folder;
  const std::string path = folder.write("LOCK", kForeign);
  std::atomic<bool> stop = false;
  std::thread renewer([&] {
    while (!stop) {
      ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  EXPECT_THAT(message_of<base::UsageError>([&] { const FolderLock lock(folder.path(), kQuick); }),
              HasSubstr("is in use by another training: process 4711 on beta, job night-run"));
  stop = true;
  renewer.join();
  EXPECT_EQ(tests::read_file(path), kForeign);
}

TEST(FolderLock, ALaterStartOfTheSameJobTakesItOver) {
  const TempDir folder;
  folder.write("LOCK", kForeign);
  const FolderLockOptions earlier{.job = "night-run", .generation = 2, .beat = std::chrono::milliseconds(1)},
      later{.job = "night-run", .generation = 3, .beat = std::chrono::minutes(5)};
  const FolderLock lock(folder.path(), later);
  EXPECT_THAT(tests::read_file(folder / "LOCK"), HasSubstr("\nnight-run\n3\n"));
}

TEST(FolderLock, TellsThatItWasTakenOver) {
  const TempDir folder;
  const FolderLock lock(folder.path(), kQuick);
  std::filesystem::rename(folder.write("new", kForeign), folder / "LOCK");
  EXPECT_THAT(message_of<base::UsageError>([&] { lock.check(); }), HasSubstr("process 4711 on beta"));
}

TEST(FolderLock, RenewsItsFile) {
  const TempDir folder;
  const FolderLock lock(folder.path(), kQuick);
  const auto time = [&] { return std::filesystem::last_write_time(folder / "LOCK"); };
  const auto first = time(), deadline = std::filesystem::file_time_type::clock::now() + std::chrono::seconds(20);
  while (time() == first && std::filesystem::file_time_type::clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_NE(time(), first);
}

TEST(FolderLock, AnIncompleteFileIsNoLock) {
  const TempDir folder;
  for (const char* text : {"", "beta", "\n\n\n\n\n\n\n", "x\n"}) {
    folder.write("LOCK", text);
    EXPECT_EQ(try_lock(folder.path()), 0) << text;
  }
  EXPECT_THAT(message_of<base::SystemError>([&] { const FolderLock lock(folder / "none"); }),
              HasSubstr("cannot lock the directory"));
}

}  // namespace
}  // namespace lockstep::checkpoint::files
