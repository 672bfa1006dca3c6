#include "lockstep/launch/process/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::process {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using tests::message_of;

TEST(Program, NamesAreSearchedInPath) {
  const tests::TempDir folder;
  const std::string plain = folder.write("a/tool", "");
  const std::string tool = folder.write("b/tool", "");
  ::chmod(tool.c_str(), 0755);
  EXPECT_EQ(find_program("tool", (folder / "nowhere") + ":" + (folder / "a") + ":" + (folder / "b")), tool);
  EXPECT_THAT(message_of<base::UsageError>([&] { find_program("tool", folder / "a"); }),
              AllOf(HasSubstr("\"tool\""), HasSubstr("PATH")));
  EXPECT_TRUE(is_executable(tool));
  EXPECT_FALSE(is_executable(plain));
}

TEST(Program, PathsAreNotSearched) {
  const tests::TempDir folder;
  const std::string plain = folder.write("train.py", "");
  EXPECT_EQ(find_program("/bin/sh", ""), "/bin/sh");
  EXPECT_THAT(message_of<base::UsageError>([&] { find_program(plain, ""); }), HasSubstr("not executable"));
  EXPECT_THAT(message_of<base::UsageError>([&] { find_program(folder.path(), ""); }), HasSubstr("not a file"));
  EXPECT_THAT(message_of<base::UsageError>([&] { find_program(folder / "none", ""); }), HasSubstr("No such file"));
}

TEST(Program, CmakePackageIsBesideTheProgram) {
  const tests::TempDir folder;
  const std::string program = folder.write("bin/lockstep", "");
  EXPECT_THAT(message_of<base::UsageError>([&] { cmake_package_folder(program); }), HasSubstr("no CMake package"));
  const std::string package = "lib/python3.11/site-packages/lockstep/sdk/lib/cmake/Lockstep";
  folder.write(package + "/LockstepConfig.cmake", "");
  EXPECT_EQ(cmake_package_folder(program), folder / package);
  folder.write("lib64/cmake/Lockstep/LockstepConfig.cmake", "");
  EXPECT_EQ(cmake_package_folder(program), folder / "lib64/cmake/Lockstep");
}

}  // namespace
}  // namespace lockstep::launcher::process
