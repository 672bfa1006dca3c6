#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/command_line.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;
using Words = std::vector<std::string>;

DoctorOptions doctor_of(Words words) {
  words.insert(words.begin(), "doctor");
  const CommandLine command = parse_command_line(words);
  EXPECT_EQ(command.subcommand, Subcommand::kDoctor);
  return command.doctor;
}

std::string doctor_error_of(Words words) {
  words.insert(words.begin(), "doctor");
  return message_of<base::UsageError>([&] { parse_command_line(words); });
}

TEST(DoctorOptions, AllOptionsAreOptional) {
  const DoctorOptions options = doctor_of({});
  EXPECT_TRUE(options.hosts.empty());
  EXPECT_TRUE(options.command.empty());
  EXPECT_FALSE(options.json || options.mpi);
  EXPECT_EQ(options.model_bytes, 250'000'000u);
}

TEST(DoctorOptions, HostOptionsAreThoseOfRun) {
  const DoctorOptions options =
      doctor_of({"-H", "a:2,b", "--connect-timeout", "3", "--interface", "eth0", "--remote-path", "/x", "--cwd", "/d",
                 "--mpi", "--json", "p", "--json", "-n"});
  ASSERT_EQ(options.hosts.size(), 2u);
  EXPECT_EQ(options.hosts[0].slots, 2);
  EXPECT_EQ(options.connect_timeout, std::chrono::seconds(3));
  EXPECT_EQ(options.interface + options.remote_path + options.directory, "eth0/x/d");
  EXPECT_TRUE(options.mpi && options.json);
  EXPECT_THAT(options.command, ElementsAre("p", "--json", "-n"));
  EXPECT_THAT(doctor_error_of({"-H", "a", "--hostfile", "x"}), HasSubstr("lockstep doctor: both -H and --hostfile"));
  EXPECT_THAT(doctor_error_of({"-n", "2"}), HasSubstr("lockstep doctor: unknown option \"-n\""));
  EXPECT_THAT(doctor_error_of({"--", ""}), HasSubstr("the program is \"\""));
}

TEST(DoctorOptions, ByteUnitsAreDecimal) {
  EXPECT_EQ(doctor_of({"--model-bytes", "7"}).model_bytes, 7u);
  EXPECT_EQ(doctor_of({"--model-bytes", "2K"}).model_bytes, 2000u);
  EXPECT_EQ(doctor_of({"--model-bytes=14G"}).model_bytes, 14'000'000'000u);
  for (const char* bad : {"0", "-1", "", "K", "1.5G", "9999999999G", "5T"})
    EXPECT_THAT(doctor_error_of({std::string("--model-bytes=") + bad}), HasSubstr("--model-bytes")) << bad;
}

TEST(DoctorOptions, HelpReturnsText) {
  const CommandLine command = parse_command_line({"doctor", "--help"});
  EXPECT_EQ(command.subcommand, Subcommand::kPrint);
  EXPECT_THAT(command.text,
              AllOf(HasSubstr("usage: lockstep doctor"), HasSubstr("--model-bytes"), HasSubstr("--hostfile")));
}

}  // namespace
}  // namespace lockstep::launcher::cli
