#include "lockstep/checkpoint/files/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint::files {
namespace {

using testing::HasSubstr;
using tests::message_of;
using tests::read_file;
using tests::TempDir;

TEST(AtomicFile, IsVisibleOnlyAfterCommit) {
  const TempDir folder;
  const auto path = folder.write("x", "before");
  const mode_t before = ::umask(027);
  AtomicFile file(path);
  ::umask(before);
  file.write("af", 2);
  file.write("ter", 3);
  EXPECT_EQ(read_file(path), "before");
  file.commit();
  EXPECT_EQ(read_file(path), "after");
  EXPECT_EQ(folder.num_entries(), 1u);
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640u) << "as the umask says";
}

TEST(AtomicFile, RemovesTempFileWithoutCommit) {
  const TempDir folder;
  const auto path = folder.write("x", "before");
  {
    AtomicFile file(path);
    file.write("after", 5);
    EXPECT_EQ(folder.num_entries(), 2u);
  }
  EXPECT_EQ(read_file(path), "before");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(AtomicFile, KeepsOldFileWhenDiskIsFull) {
  const TempDir folder;
  const auto path = folder.write("x", "before");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto message = message_of<base::SystemError>([&] {
    AtomicFile file(path);
    const std::string bytes(5000, 'x');
    file.write(bytes.data(), bytes.size());
    file.commit();
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(message, "cannot write " + path + ": File too large");
  EXPECT_EQ(read_file(path), "before");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(AtomicFile, RemovesTempFileWhenRenameFails) {
  const TempDir folder;
  std::filesystem::create_directory(folder / "x");
  EXPECT_THAT(message_of<base::SystemError>([&] {
                AtomicFile file(folder / "x");
                file.write("a", 1);
                file.commit();
              }),
              HasSubstr("cannot rename the temporary file to"));
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(AtomicFile, RejectsUnsafePaths) {
  const TempDir folder;
  for (const auto& path : {std::string(), folder.path() + "/", folder / "..", folder / "."})
    EXPECT_THAT(message_of<base::UsageError>([&] { AtomicFile file(path); }), HasSubstr("it does not name a file"));
  EXPECT_THAT(message_of<base::SystemError>([&] { AtomicFile file(folder / "none/x"); }),
              HasSubstr("cannot open the directory of"));
  std::filesystem::create_directory(folder / "open");
  ASSERT_EQ(::chmod((folder / "open").c_str(), 0777), 0);
  EXPECT_THAT(message_of<base::UsageError>([&] { AtomicFile file(folder / "open/x"); }),
              HasSubstr("has no sticky bit"));
  ASSERT_EQ(::chmod((folder / "open").c_str(), 01777), 0);
  AtomicFile file(folder / "open/x");
  file.commit();
  EXPECT_EQ(read_file(folder / "open/x"), "");
}

}  // namespace
}  // namespace lockstep::checkpoint::files
