#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "lockstep/launch/agent/rank_process.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher::agent {
namespace {

TEST(ErrorFiles, MessageOfBothForms) {
  EXPECT_EQ(error_file_message(R"({"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}})"),
            "ValueError: x");
  EXPECT_EQ(error_file_message(R"({"message": "ValueError: x"})"), "ValueError: x");
  for (const char* text :
       {"", "x", "[]", "{}", R"({"message": 5})", R"({"message": {"message": []}})", "{\"message\": "})
    EXPECT_EQ(error_file_message(text), "") << text;
  const std::string deep(100000, '[');
  EXPECT_EQ(error_file_message(deep), "");
  EXPECT_EQ(error_file_message("{\"message\": \"" + std::string(10000, 'x') + "\"}").size(),
            protocol::kMaxErrorMessageBytes);
}

TEST(ErrorFiles, AFileIsReadOnceAndRemoved) {
  const ErrorFiles files;
  EXPECT_NE(files.path(0), files.path(1));
  EXPECT_NE(files.path(0), ErrorFiles().path(0));
  EXPECT_EQ(files.take_message(1), "");
  std::ofstream(files.path(1)) << R"({"message": {"message": "ValueError: x"}})";
  EXPECT_EQ(files.take_message(0), "");
  EXPECT_EQ(files.take_message(1), "ValueError: x");
  EXPECT_FALSE(std::filesystem::exists(files.path(1)));
  EXPECT_EQ(files.take_message(1), "");
}

TEST(ErrorFiles, OnlyRegularFilesAreRead) {
  const ErrorFiles files;
  ASSERT_EQ(::mkfifo(files.path(0).c_str(), 0600), 0);
  EXPECT_EQ(files.take_message(0), "");
  std::filesystem::create_symlink("/dev/zero", files.path(1));
  EXPECT_EQ(files.take_message(1), "");
  for (const int rank : {0, 1}) std::filesystem::remove(files.path(rank));
}

}  // namespace
}  // namespace lockstep::launcher::agent
