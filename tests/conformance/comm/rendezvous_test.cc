// Tests how ranks connect without the launcher of Lockstep (variables set manually, torchrun, InitOptions), and its
// errors.
#include <gmock/gmock.h>
#include <unistd.h>

#include "lockstep/base/net/socket.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::rendezvous_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

/// Reserves a port on which rank 0 can listen.
class FreePort {
 public:
  std::string text() const { return std::to_string(base::net::local_address(fd_.get()).port); }

 private:
  base::Fd fd_ = base::net::reserve_port({"127.0.0.1", 0});
};

Variables torchrun_variables(const FreePort& port, int rank, int size) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port.text()}};
}

/// Starts all processes at once. Returns their results in the order of the list.
std::vector<ProcessResult> run_all(const std::vector<SpawnOptions>& list) {
  std::vector<std::unique_ptr<Process>> processes;
  for (const SpawnOptions& options : list) processes.push_back(std::make_unique<Process>(options));
  std::vector<ProcessResult> exits;
  for (const auto& process : processes) exits.push_back(process->wait(Deadline::in(60s)));
  return exits;
}

SpawnOptions probe(Variables env, Words words = {}) {
  SpawnOptions options;
  options.argv = {kProbe};
  options.argv.insert(options.argv.end(), words.begin(), words.end());
  options.env = std::move(env);
  return options;
}

TEST(Rendezvous, SingleProcessNeedsNoVariables) {
  const ProcessResult exit = run_process(probe({}));
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.out, "rank 0 of 1, local 0 of 1, host 0 of 1, self, sum 1\n");
  EXPECT_EQ(exit.err, "");
}

TEST(Rendezvous, TorchrunVariablesSetManually) {
  for (const int size : {1, 2, 3}) {
    const FreePort port;
    std::vector<SpawnOptions> ranks;
    for (int rank = size - 1; rank >= 0; --rank) ranks.push_back(probe(torchrun_variables(port, rank, size)));
    const auto exits = run_all(ranks);
    for (int i = 0; i < size; ++i) {
      const std::string rank = std::to_string(size - 1 - i);
      const std::string n = std::to_string(size);
      EXPECT_EQ(exits[static_cast<std::size_t>(i)].code, 0);
      EXPECT_EQ(exits[static_cast<std::size_t>(i)].out, "rank " + rank + " of " + n + ", local " + rank + " of " + n +
                                                            ", host 0 of 1, " + (size == 1 ? "self" : "shm") +
                                                            ", sum " + std::to_string(size * (size + 1) / 2) + "\n");
    }
    EXPECT_THAT(exits.back().err, HasSubstr("lockstep: " + std::to_string(size) + (size == 1 ? " rank" : " ranks") +
                                            " on 1 host (env://); transport "));
  }
}

TEST(Rendezvous, GivenLocalRanksAreKept) {
  const FreePort port;
  std::vector<SpawnOptions> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    Variables env = torchrun_variables(port, rank, 2);
    env["LOCAL_RANK"] = "0";
    env["LOCAL_WORLD_SIZE"] = "1";
    env["GROUP_RANK"] = std::to_string(rank);
    env["GROUP_WORLD_SIZE"] = "2";
    ranks.push_back(probe(env));
  }
  const auto exits = run_all(ranks);
  EXPECT_EQ(exits[1].out, "rank 1 of 2, local 0 of 1, host 1 of 2, shm, sum 3\n");
}

TEST(Rendezvous, InitOptionsOverrideVariables) {
  const FreePort port;
  const std::string address = "127.0.0.1:" + port.text();
  const Variables misleading = {{"RANK", "7"}, {"WORLD_SIZE", "9"}};
  const auto exits = run_all(
      {probe(misleading, {"--explicit", "0", "2", address}), probe(misleading, {"--explicit", "1", "2", address})});
  EXPECT_EQ(exits[0].out, "rank 0 of 2, local 0 of 2, host 0 of 1, shm, sum 3\n");
  EXPECT_EQ(exits[1].out, "rank 1 of 2, local 1 of 2, host 0 of 1, shm, sum 3\n");
}

TEST(Rendezvous, Torchrun) {
  const std::string torchrun = LOCKSTEP_TEST_TORCHRUN;
  if (torchrun.empty()) GTEST_SKIP() << "no torchrun in .deps/python/bin: scripts/setup.sh installs it";
  SpawnOptions options;
  options.argv = {torchrun, "--standalone", "--nproc-per-node", "2", "--no-python", kProbe};
  const ProcessResult exit = run_process(options, 60s);
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_THAT(exit.out, AllOf(HasSubstr("rank 0 of 2, local 0 of 2, host 0 of 1, shm, sum 3\n"),
                              HasSubstr("rank 1 of 2, local 1 of 2, host 0 of 1, shm, sum 3\n")));
  EXPECT_THAT(exit.err, HasSubstr("2 ranks on 1 host (torchrun); transport shm (all ranks share a host)"));
}

TEST(Rendezvous, TorchrunStoreIsReusedAcrossRestarts) {
  const std::string torchrun = LOCKSTEP_TEST_TORCHRUN;
  if (torchrun.empty()) GTEST_SKIP() << "no torchrun in .deps/python/bin: scripts/setup.sh installs it";
  // Rank 1 joins the second and the third job while the store still has the address of the previous job. It fails only
  // after rank 0 has printed everything, because torchrun terminates rank 0 when rank 1 fails.
  const TempDir done;
  const std::string script =
      "[ $RANK$TORCHELASTIC_RESTART_COUNT = 01 ] && sleep 1.5; " + kProbe + " || exit 9; " +
      "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && { : > $0/$RANK; until [ -e $0/0 ]; do sleep 0.1; done; exit $RANK; }; " +
      "[ $RANK = 0 ] && sleep 1.5; " + kProbe;
  SpawnOptions options;
  options.argv = {torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--no-python", "sh",
                  "-c",     script,         done.path()};
  const ProcessResult exit = run_process(options, 90s);
  EXPECT_EQ(exit.code, 0) << exit.err;
  for (const char* rank : {"rank 0", "rank 1"}) {
    int count = 0;
    const std::string line = std::string(rank) + " of 2, local ";
    for (std::size_t at = exit.out.find(line); at != std::string::npos; at = exit.out.find(line, at + 1)) ++count;
    EXPECT_EQ(count, 3) << exit.out;
  }
}

TEST(Rendezvous, SecondInitReturnsSameWorld) {
  const FreePort port;
  for (const ProcessResult& exit : run_all(
           {probe(torchrun_variables(port, 0, 2), {"--twice"}), probe(torchrun_variables(port, 1, 2), {"--twice"})}))
    EXPECT_THAT(exit.out, HasSubstr("the same world: world 2\n"));
}

TEST(Rendezvous, DuplicateRankNumber) {
  for (const std::vector<int>& numbers : {std::vector<int>{0, 0}, {0, 1, 1}, {2, 2, 0}}) {
    const FreePort port;
    std::vector<std::unique_ptr<Process>> processes;
    std::vector<std::string> pids;
    const int twice = numbers[0] == 2 ? 2 : numbers[1];
    for (const int number : numbers) {
      processes.push_back(
          std::make_unique<Process>(probe(torchrun_variables(port, number, static_cast<int>(numbers.size())))));
      if (number == twice) pids.push_back(std::to_string(processes.back()->pid()));
    }
    for (const auto& process : processes) {
      const ProcessResult exit = process->wait(Deadline::in(60s));
      EXPECT_EQ(exit.code, 78);
      EXPECT_THAT(exit.out,
                  AllOf(HasSubstr("error BAD_ARG: rank " + std::to_string(twice) + " joined twice: from host "),
                        HasSubstr(" pid " + pids[0]), HasSubstr(" pid " + pids[1])));
      EXPECT_LT(exit.elapsed, 10s);
    }
  }
}

TEST(Rendezvous, IncompleteVariablesAreReported) {
  const auto expect_bad_arg = [](Variables env, const std::string& part) {
    const ProcessResult exit = run_process(probe(std::move(env)));
    EXPECT_EQ(exit.code, 78);
    EXPECT_THAT(exit.out, AllOf(HasSubstr("error BAD_ARG: "), HasSubstr(part)));
    EXPECT_LT(exit.elapsed, 5s);
  };
  expect_bad_arg({{"RANK", "0"}}, "WORLD_SIZE is not set");
  expect_bad_arg({{"WORLD_SIZE", "2"}}, "RANK is not set");
  expect_bad_arg({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK is 2, but WORLD_SIZE is 2; expected 0 to 1");
  expect_bad_arg({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "MASTER_ADDR is not set");
  expect_bad_arg({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "123456"}},
                 "MASTER_PORT is \"123456\"; expected an integer from 1 to 65535");
  expect_bad_arg({{"LOCKSTEP_RANK", "0"}}, "LOCKSTEP_WORLD_SIZE is not set");
  expect_bad_arg({{"LOCKSTEP_TRANSPORT", "gluu"}},
                 "LOCKSTEP_TRANSPORT is \"gluu\"; expected auto, self, shm, hierarchy, tcp, mpi");
  expect_bad_arg({{"LOCKSTEP_TIMEOUT", "soon"}}, "LOCKSTEP_TIMEOUT is \"soon\"");
  expect_bad_arg({{"LOCKSTEP_JOIN_TIMEOUT", "0"}}, "LOCKSTEP_JOIN_TIMEOUT is \"0\"");
}

TEST(Rendezvous, MissingRanksAreListed) {
  const FreePort port;
  Variables second = torchrun_variables(port, 2, 4);
  second["LOCKSTEP_JOIN_TIMEOUT"] = "1.5";
  for (const ProcessResult& exit :
       run_all({probe(torchrun_variables(port, 0, 4), {"--join-timeout", "1500"}), probe(std::move(second))})) {
    EXPECT_EQ(exit.code, 124);
    EXPECT_THAT(exit.out, AllOf(HasSubstr("error JOIN_TIMEOUT: 2 of 4 ranks did not join in time: 1, 3"),
                                HasSubstr(port.text())));
    EXPECT_LT(exit.elapsed, 15s);
  }
}

TEST(Rendezvous, MissingRankZeroReportsAddress) {
  const FreePort port;
  const ProcessResult exit = run_process(probe(torchrun_variables(port, 1, 2), {"--join-timeout", "800"}));
  EXPECT_EQ(exit.code, 69);
  EXPECT_THAT(exit.out, HasSubstr("error COORDINATOR_LOST: cannot connect to 127.0.0.1:" + port.text()));
}

TEST(Rendezvous, PeerDeathIsDetectedWithoutLauncher) {
  const FreePort port;
  std::vector<SpawnOptions> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    SpawnOptions options;
    options.argv = {LOCKSTEP_CASES_PATH, "--gtest_filter=Killed.LastRankIsKilled"};
    options.env = torchrun_variables(port, rank, 2);
    ranks.push_back(options);
  }
  const auto exits = run_all(ranks);
  // The transport shm detects the death with the first message, the store on rank 0 with the second. Either may be
  // first.
  EXPECT_THAT(exits[0].out,
              AnyOf(HasSubstr("the process of rank 1 has ended"), HasSubstr("rank 1 ended without saying why")));
  EXPECT_LT(exits[0].elapsed, 20s);
}

TEST(Rendezvous, DifferentProgramIsDetected) {
  const FreePort port;
  SpawnOptions other;
  other.argv = {LOCKSTEP_CASES_PATH, "--gtest_filter=Topology.*"};
  other.env = torchrun_variables(port, 1, 2);
  const auto exits = run_all({probe(torchrun_variables(port, 0, 2)), other});
  EXPECT_EQ(exits[0].code, 70);
  EXPECT_EQ(exits[1].code, 70);
  EXPECT_THAT(exits[0].out, HasSubstr("error CONFIG_MISMATCH: rank 1 differs from rank 0 in program: \""));
  EXPECT_THAT(exits[1].err, HasSubstr("rank 1 differs from rank 0 in program: \""));
  EXPECT_LT(exits[0].elapsed, 10s);
}

TEST(Rendezvous, DifferentWorldSizesAreDetected) {
  const FreePort port;
  const auto exits = run_all({probe(torchrun_variables(port, 0, 3)), probe(torchrun_variables(port, 1, 2))});
  for (const ProcessResult& exit : exits) {
    EXPECT_THAT(exit.out, HasSubstr("error CONFIG_MISMATCH: rank 1 differs from rank 0 in world_size: \"2\" on "));
    EXPECT_LT(exit.elapsed, 15s);
  }
}

TEST(Rendezvous, UnavailableTransportIsNotReplaced) {
  const FreePort port;
  Variables env = torchrun_variables(port, 0, 2);
  env["LOCKSTEP_TRANSPORT"] = "self";
  const ProcessResult exit = run_process(probe(env));
  EXPECT_EQ(exit.code, 78);
  EXPECT_THAT(exit.out, HasSubstr("transport self requires a world of one rank, but there are 2 ranks"));
}

TEST(Rendezvous, UnknownInterfaceIsRejected) {
  const FreePort port;
  std::vector<SpawnOptions> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    Variables env = torchrun_variables(port, rank, 2);
    env["LOCKSTEP_INTERFACE"] = "nosuch0";
    env["LOCKSTEP_TRANSPORT"] = "tcp";
    ranks.push_back(probe(env));
  }
  for (const ProcessResult& exit : run_all(ranks)) {
    EXPECT_EQ(exit.code, 78);
    EXPECT_THAT(exit.out, HasSubstr("error BAD_ARG: LOCKSTEP_INTERFACE is \"nosuch0\""));
  }
}

TEST(Rendezvous, PortInUse) {
  const base::Fd listener = base::net::listen_on({"127.0.0.1", 0});
  const std::string port = std::to_string(base::net::local_address(listener.get()).port);
  const ProcessResult exit =
      run_process(probe({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}}));
  EXPECT_EQ(exit.code, 78);
  EXPECT_THAT(exit.out, HasSubstr("error PORT_IN_USE: cannot bind 127.0.0.1:" + port + ": Address already in use"));
  EXPECT_LT(exit.elapsed, 8s);
}

}  // namespace
}  // namespace lockstep::tests::rendezvous_test
