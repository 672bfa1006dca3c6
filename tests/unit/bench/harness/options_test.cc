#include "bench/harness/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/harness/baselines.h"
#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::bench {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;
using Words = std::vector<std::string>;

std::string error_of(const Words& words) {
  return message_of<base::UsageError>([&] { parse_options(words); });
}

TEST(BenchOptions, DefaultsDependOnTheBenchmark) {
  EXPECT_EQ(parse_options({"all-reduce"}).ranks, 2);
  EXPECT_EQ(parse_options({"memory"}).ranks, 4);
  EXPECT_EQ(parse_options({"arena"}).ranks, 1);
  EXPECT_THAT(parse_options({"all-reduce"}).sizes, ElementsAre(8, 4096, 65536, 1 << 20, 250 << 20));
  EXPECT_THAT(parse_options({"step"}).models, ElementsAre("mlp-50m"));
}

TEST(BenchOptions, AllOptions) {
  const Options options = parse_options({"all-reduce", "-n", "4", "--size", "4K,1M", "--rounds", "3", "--json",
                                         "--impl", "lockstep,gloo", "--mpi", "a", "--mpi", "b"});
  EXPECT_EQ(options.ranks, 4);
  EXPECT_EQ(options.rounds, 3);
  EXPECT_TRUE(options.json);
  EXPECT_THAT(options.sizes, ElementsAre(4096, 1 << 20));
  EXPECT_THAT(options.impls, ElementsAre("lockstep", "gloo"));
  EXPECT_THAT(options.mpis, ElementsAre("a", "b"));
  const Options step = parse_options({"step", "--model=cnn-1m,mlp-6m", "--optimizer", "adamw", "--python", "p"});
  EXPECT_THAT(step.models, ElementsAre("cnn-1m", "mlp-6m"));
  EXPECT_EQ(step.optimizer, "adamw");
  EXPECT_EQ(step.python, "p");
}

TEST(BenchOptions, ErrorsNameArgumentValueAndExpectedValues) {
  EXPECT_THAT(error_of({}), HasSubstr("all-reduce, step, launch, memory or arena"));
  EXPECT_THAT(error_of({"hosts"}), AllOf(HasSubstr("\"hosts\""), HasSubstr("all-reduce, step")));
  EXPECT_THAT(error_of({"step", "--model", "gpt"}), AllOf(HasSubstr("\"gpt\""), HasSubstr("mlp-50m")));
  EXPECT_THAT(error_of({"step", "--optimizer", "lion"}), AllOf(HasSubstr("\"lion\""), HasSubstr("sgd or adamw")));
  EXPECT_THAT(error_of({"all-reduce", "-n", "0"}), AllOf(HasSubstr("-n"), HasSubstr("1 to 64")));
  EXPECT_THAT(error_of({"all-reduce", "--size", "3"}), HasSubstr("--size has \"3\""));
  EXPECT_THAT(error_of({"all-reduce", "--rounds", "x"}), HasSubstr("--rounds"));
  EXPECT_THAT(error_of({"all-reduce", "--model", "mlp-6m"}), HasSubstr("has no option --model"));
  EXPECT_THAT(error_of({"arena", "-n", "2"}), HasSubstr("-n"));
  EXPECT_THAT(error_of({"launch", "--size", "8"}), HasSubstr("has no option --size"));
  EXPECT_THAT(error_of({"step", "--nonsense"}), HasSubstr("unknown option \"--nonsense\""));
}

TEST(BenchOptions, HelpIsPrinted) {
  for (const Words& words : {Words{"--help"}, Words{"-h"}, Words{"step", "--help"}}) {
    const Options options = parse_options(words);
    EXPECT_EQ(options.benchmark, "");
    EXPECT_THAT(options.text, HasSubstr("usage: lockstep bench WHAT"));
  }
}

TEST(BenchBaselines, IdentifiesMpiByVersionText) {
  EXPECT_EQ(mpi_name("mpirun (Open MPI) 4.1.4\n\nReport bugs to"), "openmpi-4.1.4");
  EXPECT_EQ(mpi_name("mpirun (Open MPI) 5.0.11"), "openmpi-5.0.11");
  EXPECT_EQ(mpi_name("HYDRA build details:\n    Version:                                 5.0.2\n"), "mpich-5.0.2");
  EXPECT_EQ(mpi_name("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101"), "intel-mpi-2021.18");
  EXPECT_EQ(mpi_name("mpirun: not found"), "");
}

}  // namespace
}  // namespace lockstep::bench
