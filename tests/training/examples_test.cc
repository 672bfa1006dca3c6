// Tests of the examples as programs: their arguments and their output.
#include <gmock/gmock.h>

#include "lockstep/base/parse.h"
#include "tests/training/training_runs.h"

namespace lockstep::tests {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

/// Starts a program with invalid arguments. Expects that it exits with 78 and prints one line that ends with `text`.
void expect_usage_error(const Words& argv, const std::string& text) {
  const ProcessResult exit = run_process({.argv = argv});
  EXPECT_EQ(exit.code, 78) << argv[1];
  EXPECT_EQ(exit.out, "");
  EXPECT_THAT(exit.err, EndsWith(text + "\n"));
  EXPECT_EQ(std::count(exit.err.begin(), exit.err.end(), '\n'), 1) << exit.err;
}

TEST(Examples, RejectBadArgumentsInOneLine) {
  const TempDir folder;
  const std::string empty = folder.write("empty/file", "");
  const auto text = folder.write("short.txt", "ten bytes.");
  const std::string mnist = LOCKSTEP_MNIST_PROGRAM, gpt = LOCKSTEP_GPT_PROGRAM, sum = LOCKSTEP_ALL_REDUCE_PROGRAM;
  const std::string names = "--data, --epochs, --batch-size, --lr, --seed, --weights, --save, --loss-log, --help";
  expect_usage_error({sum, "4"}, "01_all_reduce: error: unknown argument \"4\"; expected --help");
  expect_usage_error(
      {mnist}, "02_mnist: error: --data is missing; expected a directory with the MNIST files, such as --data mnist");
  expect_usage_error({mnist, "--epochs", "0"},
                     "02_mnist: error: --epochs is \"0\"; expected an integer from 1 to 1000");
  expect_usage_error({mnist, "--epochs", "3x"},
                     "02_mnist: error: --epochs is \"3x\"; expected an integer from 1 to 1000");
  expect_usage_error({mnist, "--batch-size=-4"}, "--batch-size is \"-4\"; expected an integer from 1 to 100000");
  expect_usage_error({mnist, "--seed", "-1"}, "--seed is \"-1\"; expected an integer from 0 to 1000000000");
  expect_usage_error({mnist, "--lr", "nan"}, "--lr is \"nan\"; expected a number from 1e-06 to 10");
  expect_usage_error({mnist, "--lr", "11"}, "--lr is \"11\"; expected a number from 1e-06 to 10");
  expect_usage_error({mnist, "--learning-rate", "1"}, "unknown argument \"--learning-rate\"; expected " + names);
  expect_usage_error({mnist, "--epochs"}, "--epochs has no value or is repeated; expected --epochs VALUE once");
  expect_usage_error({mnist, "--seed", "1", "--seed", "2"},
                     "--seed has no value or is repeated; expected --seed VALUE once");
  expect_usage_error({mnist, "--data", folder / "nowhere"},
                     "Mnist::load: the directory " + (folder / "nowhere") +
                         " has neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte.gz");
  expect_usage_error(
      {gpt}, "03_gpt: error: --corpus is missing; expected a text file or a directory with text files, or --tokens");
  expect_usage_error({gpt, "--corpus", empty}, "read_corpus: " + empty + " contains no text");
  expect_usage_error({gpt, "--corpus", folder / "nowhere"}, "read_corpus: " + (folder / "nowhere") + " does not exist");
  expect_usage_error({gpt, "--corpus", text, "--block", "8"}, "leave a part without a window of 8 characters");
  expect_usage_error({gpt, "--precision", "int8"},
                     "precision is \"int8\"; expected 32, bf16-mixed, fp16-mixed, bf16, fp16, O0, O1, O2 or O3");
  expect_usage_error({gpt, "--corpus", text, "--precision", "O2"},
                     "--precision is \"O2\"; expected 32, bf16-mixed or fp16-mixed, whose weights are float32");
  expect_usage_error({gpt, "--steps", "1e3"}, "--steps is \"1e3\"; expected an integer from 1 to 10000000");
}

TEST(Examples, RejectUnwritableFilesBeforeTraining) {
  const TempDir folder;
  write_synthetic_mnist(folder, 100);
  const std::string nowhere = folder / "nowhere/file";
  expect_usage_error({LOCKSTEP_MNIST_PROGRAM, "--data", folder.path(), "--loss-log", nowhere},
                     "--loss-log is \"" + nowhere + "\"; expected a file in an existing directory");
  expect_usage_error({LOCKSTEP_MNIST_PROGRAM, "--data", folder.path(), "--save", nowhere},
                     "--save is \"" + nowhere + "\"; expected a file in an existing directory");
  expect_usage_error(
      {LOCKSTEP_GPT_PROGRAM, "--corpus", folder.write("text", std::string(4000, 'a')), "--save", nowhere},
      "--save is \"" + nowhere + "\"; expected a file in an existing directory");
}

TEST(Examples, RejectABatchNotDivisibleByRanks) {
  const TempDir folder;
  write_synthetic_mnist(folder, 100);
  const ProcessResult exit = run_ranks(2, {LOCKSTEP_MNIST_PROGRAM, "--data", folder.path(), "--batch-size", "65"}, 78);
  EXPECT_THAT(exit.err, HasSubstr("--batch-size is \"65\"; expected a multiple of the number of ranks, 2\n"));
}

TEST(Examples, PrintHelp) {
  for (const char* const program : {LOCKSTEP_ALL_REDUCE_PROGRAM, LOCKSTEP_MNIST_PROGRAM, LOCKSTEP_GPT_PROGRAM}) {
    const ProcessResult exit = run_process({.argv = {program, "--help"}});
    EXPECT_EQ(exit.code, 0);
    EXPECT_EQ(exit.err, "");
    EXPECT_THAT(exit.out, HasSubstr("--help"));
  }
}

TEST(Examples, AllRanksPrintTheSum) {
  const ProcessResult exit = run_ranks(3, {LOCKSTEP_ALL_REDUCE_PROGRAM});
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(exit.out, HasSubstr("rank " + std::to_string(rank) + " of 3: the sum is 6\n"));
}

TEST(Examples, DrawProgressOnTheLaunchersTerminal) {
  const TempDir folder;
  write_synthetic_mnist(folder, 1000);
  const ProcessResult exit = run_process({.argv = {LOCKSTEP_MNIST_PROGRAM, "--data", folder.path(), "--epochs", "1"},
                                          .env = {{"LOCKSTEP_TERMINAL", "70"}, {"TERM", "xterm"}}});
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_THAT(exit.out, HasSubstr("━  100%  15/15"));
  EXPECT_THAT(exit.out, HasSubstr("epoch 1: validation loss "));
  for (std::string row : base::split(exit.out, '\n'))
    for (const std::string& drawn : base::split(row, '\r')) {
      const auto width = std::count_if(drawn.begin(), drawn.end(), [](char c) { return (c & 0xC0) != 0x80; });
      EXPECT_LT(width, 70) << drawn;
    }
}

}  // namespace
}  // namespace lockstep::tests
