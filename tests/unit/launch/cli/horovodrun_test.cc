#include "lockstep/launch/cli/horovodrun.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/command_line.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal_of(const std::vector<std::string>& words) {
  return tests::message_of<base::UsageError>([&] { translate_horovodrun(words); });
}

TEST(Horovodrun, TheLineOfItsManual) {
  EXPECT_THAT(translate_horovodrun({"-np", "4", "-H", "a:2,b:2", "python", "x.py", "-np", "7"}),
              ElementsAre("-n", "4", "-H", "a:2,b:2", "--", "python", "x.py", "-np", "7"));
  const CommandLine command = parse_command_line({"horovodrun", "-np", "4", "-H", "a:2,b:2", "python", "x.py"});
  EXPECT_EQ(command.subcommand, Subcommand::kRun);
  EXPECT_EQ(command.run.ranks, 4);
  EXPECT_EQ(command.run.hosts.size(), 2u);
  EXPECT_THAT(command.run.command, ElementsAre("python", "x.py"));
}

TEST(Horovodrun, OptionsAreTranslatedOrIgnored) {
  EXPECT_THAT(
      translate_horovodrun({"--num-proc=2", "--verbose", "--gloo", "--fusion-threshold-mb", "32", "--cycle-time-ms=1",
                            "--hostfile", "hosts", "--network-interfaces", "eth0", "--output-filename", "out",
                            "--start-timeout", "60", "--stall-check-shutdown-time-seconds", "120", "--", "./train"}),
      ElementsAre("-n", "2", "--hostfile", "hosts", "--interface", "eth0", "--output", "out", "--join-timeout", "60",
                  "--hang-timeout", "120", "--", "./train"));
}

TEST(Horovodrun, OthersAreRefusedWithTheWay) {
  EXPECT_THAT(refusal_of({"-np", "2", "--min-np", "1", "x"}), HasSubstr("--min-np is not supported"));
  EXPECT_THAT(refusal_of({"--nonsense", "x"}), HasSubstr("unknown option \"--nonsense\""));
  EXPECT_THAT(refusal_of({"-np"}), HasSubstr("-np has no value"));
  EXPECT_THAT(refusal_of({"-np", "2"}), HasSubstr("no program given"));
  const auto error =
      tests::thrown<base::UsageError>([&] { translate_horovodrun({"--host-discovery-script", "s", "x"}); });
  EXPECT_THAT(error.hint(), HasSubstr("--max-restarts"));
  EXPECT_THAT(parse_command_line({"horovodrun", "--help"}).text, HasSubstr("usage: lockstep horovodrun"));
}

}  // namespace
}  // namespace lockstep::launcher::cli
