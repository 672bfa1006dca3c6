#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/launch/slurm/submit.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::slurm {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

const BatchContext kContext{"/home/ada/train", "/opt/lockstep/bin/lockstep"};

std::string script_of(const Words& words, const BatchContext& context = kContext) {
  return batch_script(cli::parse_submit_options(words).options, context);
}

TEST(BatchScript, DryRunNeedsNoDirectoryForTheOutput) {
  BatchContext context = kContext;
  context.has_output_directory = false;
  const std::string script = script_of({"--time=90", "./train"}, context);
  EXPECT_THAT(script, HasSubstr("#SBATCH --output=%j.out"));
  EXPECT_THAT(script_of({"--time=90", "--array=0-3", "./train"}, context), HasSubstr("#SBATCH --output=%A_%a.out"));
}

/// Compares with the stored script byte by byte; gtest prints the lines that differ.
void expect_stored_script(const std::string& name, const std::string& script) {
  EXPECT_EQ(script, tests::read_file((std::filesystem::path(__FILE__).parent_path() / "sbatch" / name).string()))
      << name;
}

TEST(BatchScript, MatchesStoredExamples) {
  expect_stored_script("gpus.sh",
                       script_of({"--nodes", "16", "--gpus-per-node", "8", "--time", "4:00:00", "--", "./train"}));
  expect_stored_script("all_options.sh", script_of({"--nodes=2-4",
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
  expect_stored_script("array.sh",
                       script_of({"--array=0-15%4", "--ranks=8", "--time=30", "python3", "train.py", "--epochs", "3"}));
  expect_stored_script("grid.sh", script_of({"--before", "module load cuda/12", "--before=source 'my env/bin/activate'",
                                             "--grid", "lr=0.1,0.01", "--grid=note=a b,$c", "--mail", "ada@example.org",
                                             "--nodes=2", "--time=30", "--", "python3", "train.py", "--epochs", "3"}));
  expect_stored_script("no_requeue.sh", script_of({"--no-requeue", "--time=90", "./train"}));
  expect_stored_script("no_signal.sh", script_of({"--signal-before=0", "--time=90", "./train"}));
  expect_stored_script("neither.sh", script_of({"--no-requeue", "--signal-before=0", "./train"}));
  expect_stored_script("odd_words.sh",
                       script_of({"--output=my 100% 'logs'", "--comment=a \"b\" # c\\d", "--", "./my train", "", "it's",
                                  "$(id)", "`id`", "$HOME", "a\nb", "\r\t'\\", "grüße", "*", "~", "a=b", "--", "&"},
                                 {"/home/ada/a \"b\" #1", "/opt/lock step/lockstep"}));
}

TEST(BatchScript, DirectoryWithLineBreakIsRejected) {
  EXPECT_THAT(tests::message_of<base::UsageError>([] { script_of({"p"}, {"/a\nb", "lockstep"}); }),
              HasSubstr("\"/a\\nb\""));
}

TEST(BatchScript, SbatchArgumentsAreNotQuoted) {
  const Words words = sbatch_arguments(
      cli::parse_submit_options({"--nodes=2", "--constraint", "a b", "--", "p"}).options, {"/a b", "lockstep"});
  EXPECT_THAT(words, ElementsAre("--job-name=p", "--nodes=2", "--chdir=/a b", "--output=logs/%j.out", "--requeue",
                                 "--open-mode=append", "--signal=B:USR1@120", "--constraint", "a b"));
  EXPECT_THAT(sbatch_arguments(cli::parse_submit_options({"--no-requeue", "p"}).options, kContext),
              Contains("--no-requeue"));
  EXPECT_THAT(sbatch_arguments(cli::parse_submit_options({"--no-requeue", "p"}).options, kContext),
              Not(Contains(HasSubstr("open-mode"))));
}

TEST(BatchScript, QuotesForTheShell) {
  EXPECT_EQ(shell_quote("./train-1_a@b%c+d=e:f,g"), "./train-1_a@b%c+d=e:f,g");
  EXPECT_EQ(shell_quote(""), "''");
  EXPECT_EQ(shell_quote("a b"), "'a b'");
  EXPECT_EQ(shell_quote("it's"), "'it'\\''s'");
  EXPECT_EQ(shell_quote("$(x) `y` \"z\" \\"), "'$(x) `y` \"z\" \\'");
  EXPECT_EQ(shell_quote("~"), "'~'");
  EXPECT_EQ(shell_quote("ü"), "'ü'");
  EXPECT_EQ(shell_quote("a\nb"), "$'a\\nb'");
  EXPECT_EQ(shell_quote("\x01\x7f'\\\r\t"), "$'\\x01\\x7f\\'\\\\\\r\\t'");
}

TEST(BatchScript, QuotesForSbatch) {
  EXPECT_EQ(sbatch_quote("--output=logs/%j.out"), "--output=logs/%j.out");
  EXPECT_EQ(sbatch_quote("a b"), "\"a b\"");
  EXPECT_EQ(sbatch_quote("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(sbatch_quote("a'b"), "\"a'b\"");
  EXPECT_EQ(sbatch_quote("a#b"), "\"a#b\"");
  EXPECT_EQ(sbatch_quote(""), "\"\"");
}

}  // namespace
}  // namespace lockstep::launcher::slurm
