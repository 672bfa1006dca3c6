#include "lockstep/launch/output/last_fatal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "tests/support/temp_dir.h"

namespace lockstep::launcher::output {
namespace {

using ::testing::Optional;

base::Env env_with(const char* variable, const std::string& value) {
  return base::Env(
      [=](const char* name) { return name == std::string(variable) ? base::Env::Value(value) : base::Env::Value(); });
}

TEST(LastFatal, IsReadFromTheCacheOfTheUser) {
  const tests::TempDir folder;
  const base::Env env = env_with("XDG_CACHE_HOME", folder.path());
  EXPECT_EQ(last_fatal(env), std::nullopt);
  save_last_fatal("FATAL cause=DESYNC", env);
  save_last_fatal("FATAL cause=RANK_DIED", env);
  EXPECT_THAT(last_fatal(env), Optional(std::string("FATAL cause=RANK_DIED")));
  struct stat info{};
  ASSERT_EQ(::stat((folder / "lockstep/last-fatal").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  save_last_fatal("FATAL cause=DESYNC", env_with("HOME", folder.path()));
  EXPECT_TRUE(std::filesystem::exists(folder / ".cache/lockstep/last-fatal"));
}

TEST(LastFatal, WithoutAFolderThereIsNone) {
  for (const base::Env& env : {env_with("PATH", ""), env_with("HOME", "/proc/self/nowhere")}) {
    save_last_fatal("FATAL cause=DESYNC", env);
    EXPECT_EQ(last_fatal(env), std::nullopt);
  }
}

TEST(LastFatal, NoLinkIsFollowed) {
  const tests::TempDir folder;
  const base::Env env = env_with("XDG_CACHE_HOME", folder.path());
  std::filesystem::create_directory(folder / "lockstep");
  std::filesystem::create_symlink(folder / "elsewhere", folder / "lockstep/last-fatal");
  save_last_fatal("FATAL cause=DESYNC", env);
  EXPECT_FALSE(std::filesystem::exists(folder / "elsewhere"));
  EXPECT_EQ(last_fatal(env), std::nullopt);
}

}  // namespace
}  // namespace lockstep::launcher::output
