// Tests that trainings on N ranks equal those on one rank.
#include "tests/training/training_runs.h"

namespace lockstep::tests {
namespace {

constexpr double kLossTolerance = 1e-4;

/// Returns the directory of MNIST if it is installed; else writes synthetic digits, enough for 100 steps.
std::string mnist_data(const TempDir& folder) {
  if (std::filesystem::exists(LOCKSTEP_MNIST "/t10k-images-idx3-ubyte.gz")) return LOCKSTEP_MNIST;
  write_synthetic_mnist(folder, 7200);
  return folder.path();
}

TEST(Mnist, LossOfEachStepEqualsOneRank) {
  const TempDir folder;
  const std::string data = mnist_data(folder);
  // With the example's default rate, training on synthetic digits with wrong labels diverges and amplifies rounding.
  const std::string rate = data == folder.path() ? "0.02" : "0.05";
  std::vector<double> one;
  for (const int ranks : {1, 2, 4}) {
    const std::string log = folder / "loss";
    run_ranks(ranks, {LOCKSTEP_MNIST_PROGRAM, "--data", data, "--epochs", "1", "--lr", rate, "--loss-log", log});
    const auto losses = read_losses(log);
    if (ranks == 1) one = losses;
    EXPECT_LE(largest_difference(one, losses, 100), kLossTolerance) << ranks << " ranks";
  }
  EXPECT_LT(one.back(), 0.5 * one.front()) << "the training did not learn, so the comparison is void";
}

TEST(Mnist, LearnsTheDigits) {
  const TempDir folder;
  const ProcessResult exit = run_ranks(2, {LOCKSTEP_MNIST_PROGRAM, "--data", mnist_data(folder)});
  EXPECT_GE(last_number_after(exit.out, "epoch 5: validation loss "), 0) << exit.out;
  EXPECT_GE(last_number_after(exit.out, "accuracy "), 97) << exit.out;
}

TEST(Mnist, SavesReadableSafetensors) {
  const TempDir folder;
  write_synthetic_mnist(folder, 200);
  run_ranks(2,
            {LOCKSTEP_MNIST_PROGRAM, "--data", folder.path(), "--epochs", "1", "--save", folder / "net.safetensors"});
  const std::string file = read_file(folder / "net.safetensors");
  for (const char* const name : {"\"conv1.weight\"", "\"digits.bias\""})
    EXPECT_NE(file.find(name), std::string::npos) << name;
}

class Replicas : public testing::TestWithParam<int> {};

TEST_P(Replicas, AreBitEqualAfter200Steps) {
  const TempDir folder;
  run_ranks(GetParam(), {LOCKSTEP_REPLICAS_PROGRAM, "200", "exchange", folder / "losses"});
  run_ranks(1, {LOCKSTEP_REPLICAS_PROGRAM, "200", "exchange", folder / "one"});
  EXPECT_LE(largest_difference(read_losses(folder / "one"), read_losses(folder / "losses"), 200), kLossTolerance);
}

// Without reduction the results must differ: this proves that the comparison in the other tests can fail.
TEST_P(Replicas, DifferWithoutReduction) {
  const TempDir folder;
  run_ranks(GetParam(), {LOCKSTEP_REPLICAS_PROGRAM, "200", "alone", folder / "losses"}, 3);
  run_ranks(1, {LOCKSTEP_REPLICAS_PROGRAM, "200", "alone", folder / "one"});
  EXPECT_GT(largest_difference(read_losses(folder / "one"), read_losses(folder / "losses"), 200), 10 * kLossTolerance);
}

INSTANTIATE_TEST_SUITE_P(, Replicas, testing::Values(2, 3, 4),
                         [](const auto& ranks) { return "n" + std::to_string(ranks.param); });

/// Generates sentences with a simple grammar, which a language model learns in a few steps.
std::string generate_sentences() {
  constexpr const char* kNouns[] = {"gradient", "rank", "bucket", "tensor", "group"};
  constexpr const char* kVerbs[] = {"follows", "carries", "waits for", "meets"};
  std::string text;
  for (std::size_t i = 0; text.size() < 20000; i += 3)
    text += std::string("the ") + kNouns[i * i % 5] + " " + kVerbs[i % 7 % 4] + " the " + kNouns[i % 11 % 5] + ".\n";
  return text;
}

TEST(Gpt, ValidationLossOfTwoRanksEqualsOne) {
  const TempDir folder;
  folder.write("text/a.txt", generate_sentences());
  double after[3] = {};
  for (const int ranks : {1, 2}) {
    const ProcessResult exit = run_ranks(ranks, {LOCKSTEP_GPT_PROGRAM, "--corpus", folder / "text", "--steps", "40",
                                                 "--block", "32", "--batch-size", "16", "--sample", "20"});
    const double before = last_number_after(exit.out, "before: ");
    after[ranks] = last_number_after(exit.out, "after: ");
    EXPECT_LT(after[ranks], 0.7 * before) << exit.out;
  }
  EXPECT_NEAR(after[2], after[1], 0.01 * after[1]);
}

/// float16 is slow on a CPU: few steps, after which the losses are still close.
TEST(Gpt, MixedPrecisionReachesTheSameLoss) {
  const TempDir folder;
  folder.write("text/a.txt", generate_sentences());
  const auto after = [&](const std::string& precision, const std::string& steps) {
    const ProcessResult exit =
        run_ranks(2, {LOCKSTEP_GPT_PROGRAM, "--corpus", folder / "text", "--steps", steps, "--block", "32",
                      "--batch-size", "8", "--sample", "0", "--precision", precision});
    return last_number_after(exit.out, "after: ");
  };
  const double full = after("32", "40"), bfloat16 = after("bf16-mixed", "40");
  EXPECT_NE(bfloat16, full);
  EXPECT_NEAR(bfloat16, full, 0.05 * full);
  const double few = after("32", "3");
  EXPECT_NEAR(after("fp16-mixed", "3"), few, 0.01 * few);
}

}  // namespace
}  // namespace lockstep::tests
