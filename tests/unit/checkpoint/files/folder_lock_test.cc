#include "lockstep/checkpoint/files/folder_lock.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "tests/support/faulty_files.h"
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
int try_lock(const std::string& folder, const FolderLockOptions& options = kQuick) {
  try {
    const FolderLock lock(folder, options);
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

/// A process that holds the lock of a folder until it is killed.
class OtherHolder {
 public:
  explicit OtherHolder(const std::string& folder, const FolderLockOptions& options = kQuick) {
    base::Pipe answers = base::make_pipe(), questions = base::make_pipe();
    pid_ = ::fork();
    if (pid_ == 0) {
      questions.write.reset();
      const FolderLock lock(folder, options);
      char byte = 'y';
      do {
        const bool has_lock = message_of<base::UsageError>([&] { lock.check(); }).empty();
        if (::write(answers.write.get(), has_lock ? "y" : "n", 1) != 1) ::_exit(1);
      } while (::read(questions.read.get(), &byte, 1) == 1);
      ::_exit(0);
    }
    answers_ = std::move(answers.read);
    questions_ = std::move(questions.write);
    EXPECT_EQ(answer(), 'y');
  }
  ~OtherHolder() { kill(); }
  /// Returns whether check() succeeds in that process.
  bool has_lock() {
    EXPECT_EQ(::write(questions_.get(), "?", 1), 1);
    return answer() == 'y';
  }
  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  char answer() const {
    char byte = 0;
    return ::read(answers_.get(), &byte, 1) == 1 ? byte : '-';
  }

  pid_t pid_ = 0;
  base::Fd answers_, questions_;
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

/// Renews a file, as its holder on another host does.
class Renewer {
 public:
  explicit Renewer(const std::string& path)
      : thread_([this, path] {
          while (!stop_) {
            ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
        }) {}
  ~Renewer() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST(FolderLock, OfAnotherHostThatIsRenewedHolds) {
  const TempDir folder;
  const std::string path = folder.write("LOCK", kForeign);
  const Renewer renewer(path);
  EXPECT_THAT(message_of<base::UsageError>([&] { const FolderLock lock(folder.path(), kQuick); }),
              HasSubstr("is in use by another training: process 4711 on beta, job night-run"));
  EXPECT_EQ(tests::read_file(path), kForeign);
}

FolderLockOptions start_of(const char* job, int generation, std::chrono::milliseconds beat = kQuick.beat) {
  return {.job = job, .generation = generation, .beat = beat};
}

TEST(FolderLock, OnlyALaterStartOfTheSameJobTakesItOverAtOnce) {
  const TempDir folder;
  const std::string path = folder.write("LOCK", kForeign);  // generation 2 of night-run
  {
    const Renewer renewer(path);
    EXPECT_EQ(try_lock(folder.path(), start_of("night-run", 2)), 1);
    EXPECT_EQ(try_lock(folder.path(), start_of("night-run", 1)), 1);
    EXPECT_EQ(try_lock(folder.path(), start_of("day-run", 3)), 1);
    EXPECT_EQ(try_lock(folder.path(), start_of("", 3)), 1);
  }
  const FolderLock lock(folder.path(), start_of("night-run", 3, std::chrono::minutes(5)));
  EXPECT_THAT(tests::read_file(path), HasSubstr("\nnight-run\n3\n"));
}

TEST(FolderLock, OfAProcessThatExistsIsTakenOverOnlyByALaterStartOfItsJob) {
  const TempDir folder;
  OtherHolder earlier(folder.path(), start_of("night-run", 2));
  EXPECT_EQ(try_lock(folder.path(), start_of("night-run", 2)), 1);
  EXPECT_EQ(try_lock(folder.path(), start_of("night-run", 1)), 1);
  EXPECT_EQ(try_lock(folder.path(), start_of("day-run", 3)), 1);
  EXPECT_EQ(try_lock(folder.path(), start_of("", 3)), 1);
  EXPECT_TRUE(earlier.has_lock());
  const FolderLock later(folder.path(), start_of("night-run", 3, std::chrono::minutes(5)));
  later.check();
  EXPECT_FALSE(earlier.has_lock()) << "it writes no more checkpoints";
  EXPECT_EQ(in_child([&] { return try_lock(folder.path()); }), 1) << "a third process";
}

TEST(FolderLock, ProgramsWithoutAJobAreNotStartsOfOneJob) {
  const TempDir folder;
  OtherHolder other(folder.path(), start_of("", 0));
  EXPECT_EQ(try_lock(folder.path(), start_of("", 1)), 1);
  EXPECT_TRUE(other.has_lock());
}

TEST(FolderLock, UsesOnlyJobNamesThatAreUnique) {
  base::Env torchrun, lockstep;
  torchrun.torchelastic_run_id = "100";
  lockstep.lockstep_job = lockstep.torchelastic_run_id = "6f00";  // lockstep run also sets torchrun's variable
  EXPECT_EQ(unique_job_name("0", {}), "");
  EXPECT_EQ(unique_job_name("100", torchrun), "");
  EXPECT_EQ(unique_job_name("6f00", lockstep), "6f00");
  EXPECT_EQ(unique_job_name("slurm-7.0", {}), "slurm-7.0");
}

TEST(FolderLock, AFailedWriteIsAnErrorAndLeavesNoTemporaryFile) {
  int number = 0;
  {
    const TempDir folder;
    tests::record_file_operations();
    const FolderLock lock(folder.path(), kQuick);
    number = tests::end_file_operations();
  }
  ASSERT_EQ(number, 3) << "create, write, rename";
  for (const int error : {EIO, EACCES, ENOSPC})
    for (int k = 0; k < number; ++k) {
      const TempDir folder;
      tests::fail_file_operation(k, error);
      const std::string message = message_of<base::SystemError>([&] { const FolderLock lock(folder.path(), kQuick); });
      tests::end_file_operations();
      EXPECT_THAT(message, HasSubstr("cannot lock the directory " + folder.path())) << k;
      for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
        EXPECT_EQ(entry.path().filename(), "LOCK") << "left by operation " << k;
      EXPECT_EQ(try_lock(folder.path()), 0) << "the disk works again";
    }
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
