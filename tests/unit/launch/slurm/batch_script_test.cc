#include "lockstep/launch/slurm/batch_script.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

const BatchPlace kAround{"/home/ada/train", "/opt/lockstep/bin/lockstep"};

std::string script_of(const Words& words, const BatchPlace& around = kAround) {
  return batch_script(parse_submit(words).options, around);
}

/// Byte for byte; what differs is shown by line.
void expect_as_stored(const std::string& name, const std::string& script) {
  EXPECT_EQ(script, tests::read_file((std::filesystem::path(__FILE__).parent_path() / "sbatch" / name).string()))
      << name;
}

TEST(Sbatch, StoredExamples) {
  expect_as_stored("gpus.sh",
                   script_of({"--nodes", "16", "--gpus-per-node", "8", "--time", "4:00:00", "--", "./train"}));
  expect_as_stored("all_options.sh", script_of({"--nodes=2-4",
                                                "--ranks-per-node=4",
                                                "--gpus-per-node=a100:4",
                                                "--cpus-per-rank=8",
                                                "--mem=200G",
                                                "--time=1-12",
                                                "--partition=gpu",
                                                "--account=physics",
                                                "--name=gpt",
                                                "--output=/scratch/ada/logs",
                                                "--signal-before=600",
                                                "--run=--hang-timeout=900",
                                                "--qos=high",
                                                "--constraint",
                                                "nvlink",
                                                "--exclusive",
                                                "--",
                                                "./train",
                                                "--lr",
                                                "0.1"}));
  expect_as_stored("array.sh",
                   script_of({"--array=0-15%4", "--ranks=8", "--time=30", "python3", "train.py", "--epochs", "3"}));
  expect_as_stored("no_requeue.sh", script_of({"--no-requeue", "--time=90", "./train"}));
  expect_as_stored("no_signal.sh", script_of({"--signal-before=0", "--time=90", "./train"}));
  expect_as_stored("neither.sh", script_of({"--no-requeue", "--signal-before=0", "./train"}));
  expect_as_stored("odd_words.sh",
                   script_of({"--output=my 100% 'logs'", "--comment=a \"b\" # c\\d", "--", "./my train", "", "it's",
                              "$(id)", "`id`", "$HOME", "a\nb", "\r\t'\\", "grüße", "*", "~", "a=b", "--", "&"},
                             {"/home/ada/a \"b\" #1", "/opt/lock step/lockstep"}));
}

TEST(Sbatch, AFolderWithALineBreakIsRefused) {
  EXPECT_THAT(tests::message_of<base::UsageError>([] { script_of({"p"}, {"/a\nb", "lockstep"}); }),
              HasSubstr("\"/a\\nb\""));
}

TEST(Sbatch, WordsForTheCommandLineAreNotQuoted) {
  const Words words =
      batch_words(parse_submit({"--nodes=2", "--constraint", "a b", "--", "p"}).options, {"/a b", "lockstep"});
  EXPECT_THAT(words, ElementsAre("--job-name=p", "--nodes=2", "--chdir=/a b", "--output=logs/%j.out", "--requeue",
                                 "--open-mode=append", "--signal=B:USR1@120", "--constraint", "a b"));
  EXPECT_THAT(batch_words(parse_submit({"--no-requeue", "p"}).options, kAround), Contains("--no-requeue"));
  EXPECT_THAT(batch_words(parse_submit({"--no-requeue", "p"}).options, kAround), Not(Contains(HasSubstr("open-mode"))));
}

TEST(Sbatch, WordsForTheShell) {
  EXPECT_EQ(quoted_for_shell("./train-1_a@b%c+d=e:f,g"), "./train-1_a@b%c+d=e:f,g");
  EXPECT_EQ(quoted_for_shell(""), "''");
  EXPECT_EQ(quoted_for_shell("a b"), "'a b'");
  EXPECT_EQ(quoted_for_shell("it's"), "'it'\\''s'");
  EXPECT_EQ(quoted_for_shell("$(x) `y` \"z\" \\"), "'$(x) `y` \"z\" \\'");
  EXPECT_EQ(quoted_for_shell("~"), "'~'");
  EXPECT_EQ(quoted_for_shell("ü"), "'ü'");
  EXPECT_EQ(quoted_for_shell("a\nb"), "$'a\\nb'");
  EXPECT_EQ(quoted_for_shell("\x01\x7f'\\\r\t"), "$'\\x01\\x7f\\'\\\\\\r\\t'");
}

TEST(Sbatch, WordsForSbatch) {
  EXPECT_EQ(quoted_for_sbatch("--output=logs/%j.out"), "--output=logs/%j.out");
  EXPECT_EQ(quoted_for_sbatch("a b"), "\"a b\"");
  EXPECT_EQ(quoted_for_sbatch("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(quoted_for_sbatch("a'b"), "\"a'b\"");
  EXPECT_EQ(quoted_for_sbatch("a#b"), "\"a#b\"");
  EXPECT_EQ(quoted_for_sbatch(""), "\"\"");
}

}  // namespace
}  // namespace lockstep::launcher
