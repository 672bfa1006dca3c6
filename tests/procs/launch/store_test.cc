// Tests which processes may join a job, and jobs whose connection to the store is disturbed. The ranks are started with
// the variables of torchrun, or by `lockstep run`.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <tuple>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/job_key.h"
#include "tests/support/fault_proxy.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Variables = std::map<std::string, std::string>;

class StoreAccess : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  std::string key_file(const std::string& name, char byte) {
    const std::string path = folder_.write(name, std::string(32, byte));
    ::chmod(path.c_str(), 0600);
    return path;
  }

  /// Starts rank `rank` of three with train_probe chaos, or with `words`. `other` adds or replaces variables.
  void start(int rank, const Words& fault = {}, const Variables& other = {}, const Words& words = {}) {
    SpawnOptions spawn;
    spawn.argv = {LOCKSTEP_TRAIN_PROBE_PATH, "chaos", folder_.path(), "120"};
    spawn.argv.insert(spawn.argv.end(), fault.begin(), fault.end());
    if (!words.empty())
      spawn.argv.assign(words.begin(), words.end()), spawn.argv.insert(spawn.argv.begin(), LOCKSTEP_TRAIN_PROBE_PATH);
    spawn.env = {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(kRanks)},
                 {"MASTER_ADDR", "127.0.0.1"},   {"MASTER_PORT", std::to_string(port_)},
                 {"LOCKSTEP_KEY_FILE", key_},    {"OMP_NUM_THREADS", "1"},
                 {"LOCKSTEP_JOIN_TIMEOUT", "5"}};
    for (const auto& [name, value] : other) spawn.env[name] = value;
    ranks_[rank] = std::make_unique<Process>(spawn);
  }
  ProcessResult wait_for_exit(int rank, std::chrono::seconds limit = 30s) {
    return ranks_.at(rank)->wait(Deadline::in(limit));
  }

  std::string history(int rank) { return folder_ / ("rank." + std::to_string(rank) + ".jsonl"); }
  /// Returns the hash after each step from the history of a rank.
  std::vector<std::string> hashes(int rank) {
    std::vector<std::string> all;
    std::ifstream file(history(rank));
    for (std::string line; std::getline(file, line);)
      if (const std::size_t at = line.find("\"hash\": "); at != std::string::npos)
        all.push_back(base::split(line.substr(at + 9), '"')[0]);
    return all;
  }

  TempDir folder_;
  const base::Fd reserved_ = base::net::reserve_port({"127.0.0.1", 0});
  const std::uint16_t port_ = base::net::local_address(reserved_.get()).port;
  const std::string key_ = key_file("key", 'k');
  std::map<int, std::unique_ptr<Process>> ranks_;
};

TEST_F(StoreAccess, OneByteSegmentsDoNotChangeResults) {
  std::vector<std::string> plain;
  for (const bool cut : {false, true}) {
    FaultProxy proxy({"127.0.0.1", port_});
    if (cut) proxy.send_byte_by_byte();
    for (int rank = 0; rank < kRanks; ++rank)
      start(rank, {}, {{"MASTER_PORT", std::to_string(rank == 0 ? port_ : proxy.address().port)}});
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(wait_for_exit(rank).code, 0) << ranks_[rank]->err();
    EXPECT_GE(proxy.num_connections(), 2);
    EXPECT_EQ(hashes(0).size(), 120u);
    for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(hashes(rank), hashes(0));
    if (cut) {
      EXPECT_EQ(hashes(0), plain);
    }
    plain = hashes(0);
  }
}

TEST_F(StoreAccess, DifferentArgumentsAreReportedOnBothRanks) {
  for (int rank = 0; rank < kRanks; ++rank)
    start(rank, rank == 1 ? Words{"late", "9", "5"} : Words{});  // no effect, because there is no rank 9
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(wait_for_exit(rank).code, 0) << ranks_[rank]->err();
  const std::string line =
      "warning: rank 1 was started with different arguments than rank 0: \"120\" \"late\" \"9\" instead of \"120\"";
  for (const int rank : {0, 1}) EXPECT_THAT(ranks_[rank]->err(), HasSubstr(line));
  EXPECT_THAT(ranks_[2]->err(), Not(HasSubstr("different arguments")));
}

/// The connection of a rank to the store is lost while all ranks wait for another rank. The rank can connect again, or
/// it cannot (`for_good`).
class LostStoreConnection : public StoreAccess,
                            public ::testing::WithParamInterface<std::tuple<FaultProxy::CloseMode, bool>> {};
INSTANTIATE_TEST_SUITE_P(, LostStoreConnection,
                         ::testing::Combine(::testing::Values(FaultProxy::CloseMode::kReset,
                                                              FaultProxy::CloseMode::kFinish,
                                                              FaultProxy::CloseMode::kHalfClose),
                                            ::testing::Bool()));

TEST_P(LostStoreConnection, IsReplacedOrEndsJob) {
  const auto [how, for_good] = GetParam();
  FaultProxy proxy({"127.0.0.1", port_});
  // In step 40 rank 2 is 3 s late: the others wait for it in an all_reduce.
  for (int rank = 0; rank < kRanks; ++rank)
    start(rank, {"late", "2", "40"}, {{"MASTER_PORT", std::to_string(rank == 1 ? proxy.address().port : port_)}});
  const Deadline limit = Deadline::in(30s);
  while (hashes(0).size() < 40 && !limit.expired()) std::this_thread::sleep_for(10ms);
  std::this_thread::sleep_for(300ms);
  const auto begin = Deadline::Clock::now();
  if (for_good) proxy.stop_listening();
  proxy.close_connections(how);
  const ProcessResult cut = wait_for_exit(1);
  EXPECT_LT(Deadline::Clock::now() - begin,
            for_good ? 2500ms : 30000ms);  // includes the exit of a process with libtorch
  for (const int rank : {0, 2}) wait_for_exit(rank);
  // The other ranks may have finished the all_reduce with rank 1 before they were notified.
  EXPECT_EQ(hashes(0).size() == 120, !for_good) << hashes(0).size();
  if (!for_good) {
    EXPECT_EQ(cut.code, 0) << cut.err;
    return;
  }
  EXPECT_EQ(cut.code, 69);
  EXPECT_THAT(cut.err, HasSubstr("the job's store at 127.0.0.1:" + std::to_string(proxy.address().port) + " is lost"));
  EXPECT_THAT(ranks_[0]->err(), HasSubstr("rank 1"));
}

TEST_F(StoreAccess, StoreStaysUntilAllRanksHaveLeft) {
  for (int rank = 0; rank < kRanks; ++rank) start(rank, {}, {}, {"leave_early"});
  for (const int rank : {1, 2}) {
    const ProcessResult exit = wait_for_exit(rank);
    EXPECT_EQ(exit.code, 0) << exit.err;
    EXPECT_THAT(exit.out, HasSubstr("done"));
  }
  EXPECT_EQ(wait_for_exit(0).code, 0);
}

TEST_F(StoreAccess, DifferentKeyIsRejectedAndMissingRankIsListed) {
  start(0);
  start(1);
  start(2, {}, {{"LOCKSTEP_KEY_FILE", key_file("other", 'o')}});
  const ProcessResult rejected = wait_for_exit(2);
  EXPECT_EQ(rejected.code, 76);
  EXPECT_THAT(rejected.err, HasSubstr("have different job keys"));
  EXPECT_LT(rejected.elapsed, 5s);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(wait_for_exit(rank).code, 124);
    EXPECT_THAT(ranks_[rank]->err(), HasSubstr("1 of 3 ranks did not join in time: 2;"));
  }
  EXPECT_THAT(ranks_[0]->err(),
              HasSubstr("a connection that claims to be rank 2 but does not have this job's key was rejected"));
}

TEST_F(StoreAccess, DifferentGenerationIsRejected) {
  const auto start_of = [](int number) {
    return Variables{{"TORCHELASTIC_RUN_ID", "run"}, {"TORCHELASTIC_RESTART_COUNT", std::to_string(number)}};
  };
  start(0, {}, start_of(2));
  start(1, {}, start_of(1));
  const ProcessResult rejected = wait_for_exit(1);
  EXPECT_EQ(rejected.code, 76);
  EXPECT_THAT(rejected.err, HasSubstr("belongs to generation 2 of this job, but this rank belongs to generation 1"));
  EXPECT_THAT(wait_for_exit(0).err,
              AllOf(HasSubstr("rank 1 of generation 1 instead of generation 2 of this job was rejected"),
                    HasSubstr("2 of 3 ranks did not join in time: 1, 2")));
}

TEST_F(StoreAccess, MissingKeyIsReported) {
  for (int rank = 0; rank < kRanks; ++rank) start(rank, {}, {{"LOCKSTEP_KEY_FILE", ""}});
  for (int rank = 0; rank < kRanks; ++rank) {
    const ProcessResult exit = wait_for_exit(rank);
    EXPECT_EQ(exit.code, 0) << exit.err;
    EXPECT_THAT(exit.err, rank == 0 ? ::testing::Matcher<std::string>(HasSubstr("this job has no key"))
                                    : ::testing::Matcher<std::string>(Not(HasSubstr("key"))));
  }
}

TEST_F(StoreAccess, ReadableKeyFileIsRejected) {
  ::chmod(key_.c_str(), 0644);
  start(0);
  const ProcessResult exit = wait_for_exit(0);
  EXPECT_EQ(exit.code, 78);
  EXPECT_THAT(exit.err, HasSubstr("is readable or writable by users other than its owner"));
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns the key in the page of process `pid`; empty if it has none.
std::string key_of(pid_t pid) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", error)) {
    const auto link = std::filesystem::read_symlink(entry.path(), error);
    if (link.string().rfind("/memfd:lockstep-rank", 0) != 0) continue;
    const std::string page = content(entry.path());
    return page.substr(offsetof(base::telemetry::RankPage, key), sizeof(base::telemetry::JobKeyBytes));
  }
  return "";
}

TEST(JobKeyDelivery, IsNotInCommandLineOrEnvironment) {
  std::string first;
  for (int job = 0; job < 2; ++job) {
    SpawnOptions spawn = lockstep_run({"-n", "2", "--bind", "none", "--", LOCKSTEP_TRAIN_PROBE_PATH, "until_stop"});
    Process process(spawn);
    for (const char* rank : {"rank 0 pid ", "rank 1 pid "}) ASSERT_TRUE(process.wait_for(rank, Deadline::in(20s)));
    std::set<std::string> keys;
    for (const pid_t pid : process.live_processes())
      if (const std::string key = key_of(pid); !key.empty()) keys.insert(key);
    ASSERT_EQ(keys.size(), 1u) << "all ranks of a job have one key";
    const std::string key = *keys.begin();
    EXPECT_EQ(key.size(), 32u);
    EXPECT_NE(key, std::string(32, '\0'));
    EXPECT_NE(key, std::exchange(first, key)) << "another job has another key";
    for (const pid_t pid : process.live_processes())
      for (const char* file : {"/environ", "/cmdline"}) {
        const std::string text = content("/proc/" + std::to_string(pid) + file);
        EXPECT_FALSE(text.empty());
        EXPECT_EQ(text.find(key), std::string::npos);
        EXPECT_EQ(text.find(base::to_hex(key)), std::string::npos);
      }
    process.signal(SIGTERM);
    EXPECT_EQ(process.wait(Deadline::in(20s)).code, 75);
  }
}

TEST(JobKeyDelivery, ReachesGrandchildPrograms) {
  // A wrapper in Python closes all descriptors except stdin, stdout and stderr.
  const std::string script = std::string("import subprocess, sys; sys.exit(subprocess.run(['") +
                             LOCKSTEP_FAULT_PROBE_PATH + "', 'nothing', '0'], close_fds=True).returncode)";
  const ProcessResult exit = run_process(lockstep_run({"-n", "2", "--bind", "none", "--", "python3", "-c", script}));
  EXPECT_EQ(exit.code, 0) << exit.err;
}

}  // namespace
}  // namespace lockstep::tests
