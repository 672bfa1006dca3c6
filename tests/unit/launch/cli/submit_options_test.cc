#include "lockstep/launch/cli/submit_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/command_line.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::message_of;
using Words = std::vector<std::string>;

SubmitOptions options_of(const Words& words) { return parse_submit_options(words).options; }

std::string submit_error_of(const Words& words) {
  return message_of<base::UsageError>([&] { parse_submit_options(words); });
}

TEST(SubmitOptions, DefaultsMatchTheHeader) {
  const SubmitOptions submit = options_of({"./bin/train", "--lr", "0.1"});
  EXPECT_EQ(submit.nodes + submit.gpus_per_node + submit.mem + submit.time + submit.partition + submit.account +
                submit.array + submit.remote_path,
            "");
  EXPECT_EQ(submit.ranks + submit.ranks_per_node + submit.cpus_per_rank, 0);
  EXPECT_EQ(submit.name, "train");
  EXPECT_EQ(submit.output, "logs");
  EXPECT_TRUE(submit.requeue);
  EXPECT_EQ(submit.signal_before, 120);
  EXPECT_FALSE(submit.dry_run);
  EXPECT_FALSE(submit.follow);
  EXPECT_THAT(submit.run_options, IsEmpty());
  EXPECT_THAT(submit.sbatch_options, IsEmpty());
  EXPECT_THAT(submit.command, ElementsAre("./bin/train", "--lr", "0.1"));
}

TEST(SubmitOptions, AllOptionsTogether) {
  const SubmitOptions submit = options_of({"--nodes",
                                           "2-4",
                                           "--ranks-per-node=3",
                                           "--gpus-per-node",
                                           "a100:8",
                                           "-c4",
                                           "--mem",
                                           "64G",
                                           "-t",
                                           "1-12",
                                           "-p",
                                           "gpu,long",
                                           "-Aphysics",
                                           "--array=0-9:3,12%2",
                                           "-J",
                                           "run.1",
                                           "--output",
                                           "my logs",
                                           "--no-requeue",
                                           "--signal-before",
                                           "300",
                                           "--remote-path",
                                           "/opt/lockstep",
                                           "--run",
                                           "-n2",
                                           "--run=--bind=none",
                                           "--dry-run",
                                           "--",
                                           "-p"});
  EXPECT_EQ(submit.nodes, "2-4");
  EXPECT_EQ(submit.ranks_per_node, 3);
  EXPECT_EQ(submit.gpus_per_node, "a100:8");
  EXPECT_EQ(submit.cpus_per_rank, 4);
  EXPECT_EQ(submit.mem, "64G");
  EXPECT_EQ(submit.time, "1-12");
  EXPECT_EQ(submit.partition, "gpu,long");
  EXPECT_EQ(submit.account, "physics");
  EXPECT_EQ(submit.array, "0-9:3,12%2");
  EXPECT_EQ(submit.name, "run.1");
  EXPECT_EQ(submit.output, "my logs");
  EXPECT_FALSE(submit.requeue);
  EXPECT_EQ(submit.signal_before, 300);
  EXPECT_EQ(submit.remote_path, "/opt/lockstep");
  EXPECT_THAT(submit.run_options, ElementsAre("-n2", "--bind=none"));
  EXPECT_TRUE(submit.dry_run);
  EXPECT_THAT(submit.command, ElementsAre("-p"));
}

TEST(SubmitOptions, SbatchOptionNamesAreAliases) {
  EXPECT_EQ(options_of({"-N2", "p"}).nodes, "2");
  EXPECT_EQ(options_of({"--ntasks-per-node", "5", "p"}).ranks_per_node, 5);
  EXPECT_EQ(options_of({"-n", "6", "p"}).ranks, 6);
  EXPECT_EQ(options_of({"--ntasks=6", "p"}).ranks, 6);
  EXPECT_EQ(options_of({"--cpus-per-task=7", "p"}).cpus_per_rank, 7);
  EXPECT_EQ(options_of({"--job-name=x", "p"}).name, "x");
}

TEST(SubmitOptions, OneRankPerGpuByDefault) {
  EXPECT_EQ(options_of({"--gpus-per-node", "8", "p"}).ranks_per_node, 8);
  EXPECT_EQ(options_of({"--gpus-per-node", "a100:2", "p"}).ranks_per_node, 2);
  EXPECT_EQ(options_of({"--gpus-per-node", "8", "--ranks-per-node", "2", "p"}).ranks_per_node, 2);
  EXPECT_EQ(options_of({"--gpus-per-node", "8", "--ranks", "2", "p"}).ranks_per_node, 0);
}

TEST(SubmitOptions, JobNameDefaultsToTheProgram) {
  EXPECT_EQ(options_of({"/opt/my train.py"}).name, "my_train.py");
  EXPECT_EQ(options_of({"./.hidden"}).name, "lockstep");
  EXPECT_EQ(options_of({"dir/"}).name, "lockstep");
}

TEST(SubmitOptions, UnknownOptionsGoToSbatch) {
  const SubmitOptions submit = options_of({"--qos=high", "-wn1", "--nodes", "2", "--exclusive", "-H", "--mail-type=END",
                                           "./train", "--qos=low", "--", "x"});
  EXPECT_THAT(submit.sbatch_options, ElementsAre(Words{"--qos=high"}, Words{"-wn1"}, Words{"--exclusive"}, Words{"-H"},
                                                 Words{"--mail-type=END"}));
  EXPECT_THAT(submit.command, ElementsAre("./train", "--qos=low", "--", "x"));
  EXPECT_EQ(submit.nodes, "2");
}

TEST(SubmitOptions, WordBeforeDashesMayBeAnSbatchValue) {
  const SubmitOptions submit =
      options_of({"--constraint", "gpu", "-w", "n1", "--new-flag", "--nodes", "2", "--", "./train", "--", "x"});
  EXPECT_THAT(submit.sbatch_options, ElementsAre(Words{"--constraint", "gpu"}, Words{"-w", "n1"}, Words{"--new-flag"}));
  EXPECT_THAT(submit.command, ElementsAre("./train", "--", "x"));
  // An option without a value does not take the next word, even if `--` follows.
  EXPECT_THAT(options_of({"--exclusive", "./train", "--", "x"}).command, ElementsAre("./train", "--", "x"));
  EXPECT_THAT(options_of({"--comment=", "./train"}).sbatch_options, ElementsAre(Words{"--comment="}));
}

TEST(SubmitOptions, AmbiguousProgramIsRejected) {
  EXPECT_THAT(submit_error_of({"--constraint", "gpu", "./train"}),
              AllOf(HasSubstr("\"gpu\""), HasSubstr("\"--constraint=gpu\""), HasSubstr("-- before the program")));
  EXPECT_THAT(submit_error_of({"-w", "n1", "./train"}), AllOf(HasSubstr("\"-w\""), HasSubstr("\"-wn1\"")));
  EXPECT_THAT(submit_error_of({"--new-flag", "./train"}),
              HasSubstr("\"./train\" may be the value of the sbatch option \"--new-flag\""));
  EXPECT_THAT(submit_error_of({"--constraint", "", "--", "./train"}), HasSubstr("\"--constraint\" is \"\""));
}

TEST(SubmitOptions, OptionsSetByTheScriptAreRejected) {
  for (const char* word : {"-o", "-ox", "-D/tmp", "--chdir=/tmp", "--signal=USR1", "--open-mode=truncate",
                           "--test-only", "--wait", "-W", "--wrap=x"})
    EXPECT_THAT(submit_error_of({word, "p"}), HasSubstr("is not passed on to sbatch; ")) << word;
  EXPECT_THAT(submit_error_of({"--signal=USR1", "p"}), HasSubstr("--signal-before SECONDS"));
}

TEST(SubmitOptions, AllTimeLimitForms) {
  EXPECT_EQ(parse_time_limit("90"), 5400);
  EXPECT_EQ(parse_time_limit("4:30"), 270);
  EXPECT_EQ(parse_time_limit("4:00:00"), 14400);
  EXPECT_EQ(parse_time_limit("1-12"), 129600);
  EXPECT_EQ(parse_time_limit("1-12:30"), 131400);
  EXPECT_EQ(parse_time_limit("1-12:30:15"), 131415);
  EXPECT_EQ(parse_time_limit("0"), 0);
  for (const char* bad :
       {"", "-", "1-", "-1", ":", "1:", "1:2:3:4", "1-2-3", "4h", " 4", "1.5", "1-2:3:4:5", "12345678901"})
    EXPECT_FALSE(parse_time_limit(bad)) << bad;
}

TEST(SubmitOptions, SignalPrecedesTheTimeLimit) {
  EXPECT_EQ(options_of({"--time", "2:00:00", "p"}).signal_before, 120);
  EXPECT_EQ(options_of({"--time", "4", "p"}).signal_before, 60);
  EXPECT_EQ(options_of({"--time", "0", "p"}).signal_before, 120);
  EXPECT_EQ(options_of({"--time", "4", "--signal-before", "239", "p"}).signal_before, 239);
  EXPECT_EQ(options_of({"--signal-before", "0", "p"}).signal_before, 0);
  EXPECT_THAT(submit_error_of({"--time", "4", "--signal-before", "240", "p"}),
              AllOf(HasSubstr("--signal-before is 240"), HasSubstr("240 s"), HasSubstr("fewer")));
}

TEST(SubmitOptions, ErrorsNameArgumentValueAndExpectedValues) {
  for (const char* bad : {"0", "4097", "x", "1-", "4-2", "1-2-3", "-1", "1.5"})
    EXPECT_THAT(submit_error_of({std::string("--nodes=") + bad, "p"}),
                AllOf(HasSubstr("--nodes is \"" + std::string(bad) + "\""), HasSubstr("1 to 4096, or MIN-MAX")))
        << bad;
  for (const char* bad : {"0", "x", "a100:", ":8", "a b:8", "1025", "a100:8:1"})
    EXPECT_THAT(submit_error_of({std::string("--gpus-per-node=") + bad, "p"}),
                AllOf(HasSubstr("--gpus-per-node is \"" + std::string(bad) + "\""), HasSubstr("TYPE:N")))
        << bad;
  for (const char* bad : {"G", "4GB", "-1", "1.5G"})
    EXPECT_THAT(submit_error_of({std::string("--mem=") + bad, "p"}),
                AllOf(HasSubstr("--mem is \""), HasSubstr("K, M, G or T")))
        << bad;
  for (const char* bad : {"x", "1-", "1:2", "1-2:", "1,", "%2", "1%", "1%2%3", "1 2"})
    EXPECT_THAT(submit_error_of({std::string("--array=") + bad, "p"}),
                AllOf(HasSubstr("--array is \""), HasSubstr("0-15%4")))
        << bad;
  EXPECT_THAT(submit_error_of({"--time=4h", "p"}), AllOf(HasSubstr("--time is \"4h\""), HasSubstr("d-h:m:s")));
  EXPECT_THAT(submit_error_of({"--ranks=0", "p"}), AllOf(HasSubstr("--ranks is \"0\""), HasSubstr("1 to 4096")));
  EXPECT_THAT(submit_error_of({"--ranks-per-node=x", "p"}),
              AllOf(HasSubstr("--ranks-per-node is \"x\""), HasSubstr("1 to 1024")));
  EXPECT_THAT(submit_error_of({"--cpus-per-rank=0", "p"}), HasSubstr("--cpus-per-rank is \"0\""));
  EXPECT_THAT(submit_error_of({"--signal-before=65536", "p"}),
              AllOf(HasSubstr("--signal-before is \"65536\""), HasSubstr("0 to 65535")));
  EXPECT_THAT(submit_error_of({"--partition=a b", "p"}), HasSubstr("--partition is \"a b\""));
  EXPECT_THAT(submit_error_of({"--account=a\nb", "p"}), HasSubstr("--account is \"a\\nb\""));
  EXPECT_THAT(submit_error_of({"--name=a b", "p"}), HasSubstr("--name is \"a b\""));
  EXPECT_THAT(submit_error_of({"--output=a\nb", "p"}), HasSubstr("--output is \"a\\nb\""));
  EXPECT_THAT(submit_error_of({"--output=a\\b", "p"}), HasSubstr("backslashes"));
  EXPECT_THAT(submit_error_of({"--comment=a\nb", "p"}), AllOf(HasSubstr("\"--comment=a\\nb\""), HasSubstr("one line")));
  EXPECT_THAT(submit_error_of({"--nodes=", "p"}), HasSubstr("--nodes is \"\""));
  EXPECT_THAT(submit_error_of({"--nodes"}), HasSubstr("--nodes has no value"));
  EXPECT_THAT(submit_error_of({"--nodes=1", "--nodes=2", "p"}), HasSubstr("--nodes"));
}

TEST(SubmitOptions, ContradictoryOptionsAreRejected) {
  EXPECT_THAT(submit_error_of({"--ranks=2", "--ranks-per-node=2", "p"}), HasSubstr("one of them"));
  EXPECT_THAT(submit_error_of({"--requeue", "--no-requeue", "p"}), HasSubstr("one of them"));
  EXPECT_THAT(submit_error_of({"--array=1-2", "--follow", "p"}), HasSubstr("one of them"));
  EXPECT_THAT(submit_error_of({"--nodes", "2"}), HasSubstr("no program"));
  EXPECT_THAT(submit_error_of({"--"}), HasSubstr("no program"));
  EXPECT_THAT(submit_error_of({}), HasSubstr("no program"));
}

TEST(SubmitOptions, RunOptionsAreChecked) {
  EXPECT_THAT(submit_error_of({"--run=--hang-timeut=3", "p"}), HasSubstr("unknown option \"--hang-timeut=3\""));
  EXPECT_THAT(submit_error_of({"--run=--grace=x", "p"}), HasSubstr("--grace is \"x\""));
  EXPECT_THAT(submit_error_of({"--run=train", "p"}), HasSubstr("--run is \"train\""));
  EXPECT_THAT(submit_error_of({"--run=--help", "p"}), HasSubstr("--run is \"--help\""));
  EXPECT_THAT(submit_error_of({"--run=--", "p"}), HasSubstr("--run is \"--\""));
  EXPECT_THAT(submit_error_of({"--run=--output=x", "p"}), HasSubstr("--output of lockstep submit"));
  EXPECT_THAT(options_of({"--run", "--grace", "--run", "3", "p"}).run_options, ElementsAre("--grace", "3"));
  EXPECT_THAT(options_of({"--run=--min-hosts=2", "--run=--max-restarts=5", "p"}).run_options,
              ElementsAre("--min-hosts=2", "--max-restarts=5"));
  EXPECT_THAT(submit_error_of({"--run=--max-restarts=x", "p"}), HasSubstr("--max-restarts is \"x\""));
  EXPECT_THAT(submit_error_of({"--run=[-n,2]", "p"}), HasSubstr("--run is \"[-n,2]\""));  // one word, not a list
}

TEST(SubmitOptions, HelpNeedsNoProgram) {
  for (const char* word : {"--help", "-h"})
    EXPECT_THAT(parse_submit_options({word}).help, HasSubstr("usage: lockstep submit [options]"));
  EXPECT_EQ(parse_submit_options({"p", "--help"}).help, "");
}

TEST(SubmitOptions, HelpFitsIn100Columns) {
  for (const std::string& line : base::split(parse_submit_options({"--help"}).help, '\n'))
    EXPECT_LE(line.size(), 100u) << line;
}

TEST(SubmitOptions, SubmitPassesItsArgumentsOn) {
  const CommandLine command = parse_command_line({"submit", "--nodes", "2", "p"});
  EXPECT_EQ(command.subcommand, Subcommand::kSubmit);
  EXPECT_THAT(command.arguments, ElementsAre("--nodes", "2", "p"));
}

TEST(SubmitOptions, GridHasATaskForEachCombination) {
  const SubmitOptions submit = options_of({"--grid", "lr=0.1,0.01", "--grid=seed=1,2,3", "p"});
  EXPECT_EQ(submit.array, "0-5");
  ASSERT_EQ(submit.grid.size(), 6U);
  EXPECT_EQ(submit.grid[0], (std::vector<std::string>{"--lr=0.1", "--seed=1"}));
  EXPECT_EQ(submit.grid[5], (std::vector<std::string>{"--lr=0.01", "--seed=3"}));
}

TEST(SubmitOptions, BadGridsMailsAndCommandsAreRejected) {
  for (const std::string bad : {"lr", "=1", "lr=", "lr=1,,2", "-x=1", "1=2", "a b=1"})
    EXPECT_THAT(submit_error_of({"--grid=" + bad, "p"}), HasSubstr("expected NAME=VALUE,VALUE")) << bad;
  std::string hundred = "=0";
  for (int i = 1; i < 100; ++i) hundred += "," + std::to_string(i);
  EXPECT_THAT(submit_error_of({"--grid=a" + hundred, "--grid=b" + hundred, "p"}), HasSubstr("at most 1000"));
  EXPECT_THAT(submit_error_of({"--grid=a=1", "--array=0-3", "p"}), HasSubstr("both --grid and --array"));
  EXPECT_THAT(submit_error_of({"--grid=a=1", "--follow", "p"}), HasSubstr("both --follow and --grid"));
  EXPECT_THAT(submit_error_of({"--mail", "a b", "p"}), HasSubstr("--mail is \"a b\""));
  EXPECT_THAT(submit_error_of({"--before=a\nb", "p"}), HasSubstr("one command on one line"));
}

}  // namespace
}  // namespace lockstep::launcher::cli
