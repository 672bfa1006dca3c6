#include "lockstep/launch/cli/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;
using Words = std::vector<std::string>;

RunOptions run_of(Words words) {
  words.insert(words.begin(), "run");
  const CommandLine command = parse_command_line(words);
  EXPECT_EQ(command.subcommand, Subcommand::kRun);
  return command.run;
}

std::string error_of(Words words) {
  return message_of<base::UsageError>([&] { parse_command_line(words); });
}

TEST(CommandLineOptions, DefaultsMatchTheHeader) {
  const RunOptions run = run_of({"prog"});
  EXPECT_EQ(run.ranks, 0);
  EXPECT_EQ(run.bind, Bind::kAuto);
  EXPECT_EQ(run.grace, std::chrono::seconds(10));
  EXPECT_EQ(run.fail_grace, std::chrono::seconds(2));
  EXPECT_EQ(run.transport + run.name + run.local_rank_argument + run.output_dir, "");
  EXPECT_FALSE(run.hang_timeout);
  EXPECT_FALSE(run.stall_timeout);
  EXPECT_FALSE(run.work_timeout);
  EXPECT_EQ(run.idle_timeout.count(), 0);
  EXPECT_EQ(run.max_restarts + run.min_hosts, 0);
  EXPECT_EQ(run.restart_pause, std::chrono::seconds(1));
  EXPECT_THAT(run.command, ElementsAre("prog"));
}

TEST(CommandLineOptions, RestartOptions) {
  const RunOptions run = run_of(
      {"--max-restarts", "3", "--restart-pause", "0.25", "--min-hosts", "2", "--retry-exit-code", "130", "prog"});
  EXPECT_EQ(run.retry_exit_code, 130);
  EXPECT_EQ(run.max_restarts, 3);
  EXPECT_EQ(run.restart_pause, std::chrono::milliseconds(250));
  EXPECT_EQ(run.min_hosts, 2);
  EXPECT_THAT(error_of({"run", "--max-restarts", "-1", "p"}),
              AllOf(HasSubstr("--max-restarts is \"-1\""), HasSubstr("0 to 1000000")));
  EXPECT_THAT(error_of({"run", "--max-restarts", "1", "--restart-pause", "61", "p"}),
              AllOf(HasSubstr("--restart-pause is \"61\""), HasSubstr("0 to 60")));
  EXPECT_THAT(error_of({"run", "--max-restarts", "1", "--restart-pause", "x", "p"}),
              HasSubstr("--restart-pause is \"x\""));
  EXPECT_THAT(error_of({"run", "--max-restarts", "1", "--min-hosts", "0", "p"}),
              AllOf(HasSubstr("--min-hosts is \"0\""), HasSubstr("1 to")));
  EXPECT_THAT(error_of({"run", "--min-hosts", "1", "p"}), HasSubstr("--min-hosts requires --max-restarts"));
  EXPECT_THAT(error_of({"run", "--restart-pause", "1", "p"}), HasSubstr("--restart-pause requires --max-restarts"));
}

TEST(CommandLineOptions, BuildTakesOneOption) {
  EXPECT_EQ(parse_command_line({"build"}).subcommand, Subcommand::kBuild);
  EXPECT_EQ(parse_command_line({"build"}).python, "");
  EXPECT_EQ(parse_command_line({"build", "--python", "env/bin/python"}).python, "env/bin/python");
  EXPECT_EQ(parse_command_line({"build", "--help"}).subcommand, Subcommand::kPrint);
  EXPECT_THAT(error_of({"build", "--python", ""}), HasSubstr("--python is \"\""));
  EXPECT_THAT(error_of({"build", "python3"}), HasSubstr("unknown argument \"python3\""));
}

TEST(CommandLineOptions, StatusTakesOneOption) {
  EXPECT_EQ(parse_command_line({"status"}).subcommand, Subcommand::kStatus);
  EXPECT_FALSE(parse_command_line({"status"}).json);
  EXPECT_TRUE(parse_command_line({"status", "--json"}).json);
  EXPECT_EQ(parse_command_line({"status", "--help"}).subcommand, Subcommand::kPrint);
  EXPECT_THAT(error_of({"status", "--jsn"}), AllOf(HasSubstr("\"--jsn\""), HasSubstr("did you mean --json?")));
}

TEST(CommandLineOptions, EverySpellingOfTheNumberOfRanks) {
  for (const Words& words : {Words{"-n", "3", "p"}, Words{"-np", "3", "p"}, Words{"-n3", "p"}, Words{"-np3", "p"},
                             Words{"--ranks=3", "p"}, Words{"--ranks", "3", "--", "p"}}) {
    EXPECT_EQ(run_of(words).ranks, 3) << words[0];
    EXPECT_THAT(run_of(words).command, ElementsAre("p"));
  }
}

TEST(CommandLineOptions, ProgramArgumentsAreNotParsed) {
  EXPECT_EQ(run_of({"-hosts", "a:2,b", "-n", "3", "p"}).hosts.size(), 2u) << "one dash, as Open MPI takes";
  EXPECT_THAT(error_of({"run", "-hostfile", "/no/file", "p"}), HasSubstr("--hostfile is \"/no/file\""));
  EXPECT_THAT(run_of({"-n", "2", "p", "-n", "7", "-np", "--help", "--", "x"}).command,
              ElementsAre("p", "-n", "7", "-np", "--help", "--", "x"));
  EXPECT_THAT(run_of({"--", "--odd", "-n"}).command, ElementsAre("--odd", "-n"));
  EXPECT_THAT(run_of({"-n", "2", "p", ""}).command, ElementsAre("p", ""));
}

TEST(CommandLineOptions, AllOptionsTogether) {
  const RunOptions run = run_of({"--transport",
                                 "tcp",
                                 "--bind=none",
                                 "--pass-local-rank=rank_here",
                                 "--output",
                                 "out",
                                 "--quiet-ranks",
                                 "--grace",
                                 "0.5",
                                 "--fail-grace",
                                 "0",
                                 "--hang-timeout",
                                 "30",
                                 "--stall-timeout",
                                 "0",
                                 "--work-timeout",
                                 "20",
                                 "--idle-timeout",
                                 "60",
                                 "--name",
                                 "run.1",
                                 "--trace",
                                 "-np",
                                 "4",
                                 "p",
                                 "a"});
  EXPECT_EQ(run.transport, "tcp");
  EXPECT_EQ(run.bind, Bind::kNone);
  EXPECT_EQ(run.local_rank_argument, "rank_here");
  EXPECT_EQ(run.output_dir, "out");
  EXPECT_TRUE(run.quiet_ranks);
  EXPECT_TRUE(run.trace);
  EXPECT_EQ(run.grace, std::chrono::milliseconds(500));
  EXPECT_EQ(run.fail_grace, std::chrono::milliseconds(0));
  EXPECT_EQ(run.hang_timeout, std::chrono::seconds(30));
  EXPECT_EQ(run.stall_timeout, std::chrono::seconds(0));
  EXPECT_EQ(run.work_timeout, std::chrono::seconds(20));
  EXPECT_EQ(run.idle_timeout, std::chrono::seconds(60));
  EXPECT_EQ(run.name, "run.1");
  EXPECT_EQ(run.ranks, 4);
  EXPECT_THAT(run.command, ElementsAre("p", "a"));
}

TEST(CommandLineOptions, PassLocalRankTakesNoSeparateValue) {
  const RunOptions run = run_of({"--pass-local-rank", "p"});
  EXPECT_EQ(run.local_rank_argument, "local_rank");
  EXPECT_THAT(run.command, ElementsAre("p"));
}

TEST(CommandLineOptions, ErrorsNameArgumentValueAndExpectedValues) {
  for (const char* bad : {"0", "-1", "12a", "4097", "99999999999999999999", " 1", "1.5"})
    EXPECT_THAT(error_of({"run", std::string("--ranks=") + bad, "p"}),
                AllOf(HasSubstr("-n"), HasSubstr(bad), HasSubstr("1 to 4096")))
        << bad;
  EXPECT_THAT(error_of({"run", "-n", "two", "p"}), AllOf(HasSubstr("\"two\""), HasSubstr("1 to 4096")));
  EXPECT_THAT(error_of({"run", "--transport", "tcpp", "p"}),
              AllOf(HasSubstr("--transport is \"tcpp\""), HasSubstr("auto, self, shm, hierarchy, tcp, mpi")));
  EXPECT_THAT(error_of({"run", "--bind", "x", "p"}),
              AllOf(HasSubstr("--bind is \"x\""), HasSubstr("auto, cores or none")));
  EXPECT_THAT(error_of({"run", "--grace", "-1", "p"}), AllOf(HasSubstr("--grace is \"-1\""), HasSubstr("0 or more")));
  EXPECT_THAT(error_of({"run", "--fail-grace", "inf", "p"}), HasSubstr("--fail-grace is \"inf\""));
  EXPECT_THAT(error_of({"run", "--join-timeout", "0", "p"}),
              AllOf(HasSubstr("--join-timeout is \"0\""), HasSubstr("more than 0")));
  EXPECT_THAT(error_of({"run", "--hang-timeout", "soon", "p"}),
              AllOf(HasSubstr("--hang-timeout is \"soon\""), HasSubstr("0 or more")));
  EXPECT_THAT(error_of({"run", "--stall-timeout", "-1", "p"}), HasSubstr("--stall-timeout is \"-1\""));
  EXPECT_THAT(error_of({"run", "--inject", "fire@rank=1,step=2", "p"}),
              AllOf(HasSubstr("--inject is \"fire@rank=1,step=2\""), HasSubstr("kill, stop, segv")));
  for (const char* bad : {".", "..", "a/b", "-x", "a b", "\n"})
    EXPECT_THAT(error_of({"run", std::string("--name=") + bad, "p"}), HasSubstr("--name is ")) << bad;
  EXPECT_THAT(error_of({"run", "--pass-local-rank=a b", "p"}), HasSubstr("--pass-local-rank is \"a b\""));
  EXPECT_THAT(error_of({"run", "--nonsense", "p"}),
              HasSubstr("unknown option \"--nonsense\"; see lockstep run --help"));
  EXPECT_THAT(error_of({"run", "--hang-timeot=5", "p"}),
              HasSubstr("; see lockstep run --help; did you mean --hang-timeout?"));
  EXPECT_THAT(error_of({"run", "-n"}), HasSubstr("--ranks"));
  EXPECT_THAT(error_of({"run", "-n", "2"}), HasSubstr("no program"));
  EXPECT_THAT(error_of({"run", "--"}), HasSubstr("no program"));
  EXPECT_THAT(error_of({"walk"}), AllOf(HasSubstr("\"walk\""), HasSubstr("run")));
  EXPECT_THAT(error_of({}), HasSubstr("no command"));
}

TEST(CommandLineOptions, ErrorsAreOneLine) {
  for (const Words& words :
       {Words{"run", "-n", "1\n2", "p"}, Words{"run", "-n"}, Words{"run", "--a\nb"}, Words{"x\ny"}})
    EXPECT_EQ(error_of(words).find('\n'), std::string::npos) << error_of(words);
}

TEST(CommandLineOptions, HelpAndVersionArePrinted) {
  for (const Words& words :
       {Words{"--help"}, Words{"run", "--help"}, Words{"run", "-n", "2", "-h"}, Words{"--version"}}) {
    const CommandLine command = parse_command_line(words);
    EXPECT_EQ(command.subcommand, Subcommand::kPrint);
    EXPECT_FALSE(command.text.empty());
  }
  EXPECT_EQ(parse_command_line({"agent"}).subcommand, Subcommand::kAgent);
}

TEST(CommandLineOptions, HelpCommandEqualsTheHelpOption) {
  for (const char* command : {"run", "doctor", "status", "build"})
    EXPECT_EQ(parse_command_line({"help", command}).text, parse_command_line({command, "--help"}).text) << command;
  for (const char* command : {"submit", "bench"}) {
    const CommandLine help = parse_command_line({"help", command});
    EXPECT_EQ(help.subcommand, parse_command_line({command}).subcommand) << command;
    EXPECT_THAT(help.arguments, ElementsAre("--help")) << command;
  }
  EXPECT_EQ(parse_command_line({"help"}).text, parse_command_line({"--help"}).text);
  EXPECT_THAT(error_of({"help", "walk"}), AllOf(HasSubstr("unknown command \"walk\""), HasSubstr("run, submit")));
  EXPECT_THAT(error_of({"help", "agent"}), HasSubstr("unknown command \"agent\""));
  EXPECT_THAT(error_of({"rnu", "./train"}), HasSubstr("unknown command \"rnu\"; expected"));
  EXPECT_THAT(error_of({"submti", "./train"}),
              AllOf(HasSubstr("unknown command \"submti\"; expected"), HasSubstr("; did you mean submit?")));
  EXPECT_THAT(error_of({"help", "benh"}), HasSubstr("; did you mean bench?"));
  EXPECT_THAT(error_of({"help", "run", "submit"}), HasSubstr("unexpected argument \"submit\""));
}

TEST(CommandLineOptions, EveryGroupOfTheHelpHasAnExample) {
  const std::string help = parse_command_line({"run", "--help"}).text;
  std::size_t begin = 0;
  for (const char* group : {"What to run", "Hosts", "GPUs and cores", "Output", "Failures", "Testing"}) {
    const std::size_t heading = help.find(std::string("\n") + group + ":\n", begin);
    ASSERT_NE(heading, std::string::npos) << group;
    const std::size_t example = help.find("\n  Example: lockstep run ", heading);
    EXPECT_EQ(example, help.find("\n  Example: ", heading)) << group;
    EXPECT_LT(example, help.find("\n\n", heading + 1)) << group;
    begin = example;
  }
  EXPECT_EQ(help.find("--slurm-step"), std::string::npos) << "an internal option";
}

TEST(CommandLineOptions, HelpFitsIn100Columns) {
  for (const Words& words : {Words{"help"}, Words{"help", "run"}, Words{"help", "doctor"}, Words{"help", "status"}})
    for (const std::string& line : base::split(parse_command_line(words).text, '\n'))
      EXPECT_LE(line.size(), 100u) << line;
}

TEST(CommandLineOptions, BenchPassesItsArgumentsOn) {
  const CommandLine command = parse_command_line({"bench", "all-reduce", "-n", "2", "--help"});
  EXPECT_EQ(command.subcommand, Subcommand::kBench);
  EXPECT_THAT(command.arguments, ElementsAre("all-reduce", "-n", "2", "--help"));
}

}  // namespace
}  // namespace lockstep::launcher::cli
