#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/atomic_file.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint::files {
namespace {

TEST(AtomicDirectory, IsRemoved) {
  const tests::TempDir folder;
  std::filesystem::create_directories(folder / "step-1/part");
  std::ofstream(folder / "step-1/part/file") << "x";
  remove_directory(folder.path(), "step-1", "MANIFEST.json");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// In a container, a checkpoint may belong to its image: a folder there cannot be renamed.
TEST(AtomicDirectory, IsRemovedFromAnOverlayFileSystem) {
  const tests::TempDir folder;
  for (const char* name : {"lower/step-1/part", "mount"}) std::filesystem::create_directories(folder / name);
  std::ofstream(folder / "lower/step-1/MANIFEST.json") << "{}";
  std::ofstream(folder / "lower/step-1/part/file") << "x";
  const std::string mount = folder / "mount";
  const pid_t child = ::fork();
  if (child == 0) {  // in a mount namespace of its own
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) ::_exit(77);
    if (::mount("tmpfs", "/mnt", "tmpfs", 0, nullptr) != 0) ::_exit(77);
    std::filesystem::create_directories("/mnt/upper");
    std::filesystem::create_directories("/mnt/work");
    const std::string options =
        "lowerdir=" + (folder / "lower") + ",upperdir=/mnt/upper,workdir=/mnt/work,redirect_dir=off";
    if (::mount("overlay", mount.c_str(), "overlay", 0, options.c_str()) != 0) ::_exit(77);
    const auto is_removed = [&] {
      try {
        remove_directory(mount, "step-1", "MANIFEST.json");
        return true;
      } catch (const base::SystemError&) {
        return false;
      }
    };
    // While a part cannot be removed, there is no manifest that would make the rest a checkpoint.
    if (::mount("tmpfs", (mount + "/step-1/part").c_str(), "tmpfs", 0, nullptr) != 0) ::_exit(77);
    if (is_removed() || std::filesystem::exists(mount + "/step-1/MANIFEST.json")) ::_exit(1);
    ::umount((mount + "/step-1/part").c_str());
    ::_exit(is_removed() && !std::filesystem::exists(mount + "/step-1") ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no overlay file system can be mounted here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace lockstep::checkpoint::files
