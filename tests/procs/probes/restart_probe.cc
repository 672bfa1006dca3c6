// A rank that behaves like a training, without torch: it has steps that need all ranks, and checkpoints.
//   restart_probe FOLDER STEPS EVERY [exits SAVES | hold]
// After each step it writes a line to FOLDER/rank.N.jsonl, for check_history.py. Every EVERY steps, rank 0 writes the
// state to FOLDER/checkpoint; at the end it prints the state. exits: rank 0 returns 7 after SAVES checkpoints of this
// start. hold: the rank joins, prints "held PID" and stops itself with SIGSTOP.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/health/heartbeat.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/store_client.h"

namespace {

using namespace lockstep;
using namespace std::chrono_literals;
using base::Deadline;

constexpr int kSamplesPerRank = 4;
constexpr int kStoppedExitCode = 69;

/// splitmix64.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct State {
  std::int64_t sequence = 0, step = 0, sample = 0;
  std::uint64_t params = 1;
};

State load_newest(const std::string& folder) {
  State state;
  std::ifstream file(folder + "/checkpoint");
  file >> state.sequence >> state.step >> state.sample >> state.params;
  return file ? state : State();
}

void save(const std::string& folder, const State& state) {
  const std::string path = folder + "/checkpoint", temp = path + ".tmp";
  const std::string text = std::to_string(state.sequence) + " " + std::to_string(state.step) + " " +
                           std::to_string(state.sample) + " " + std::to_string(state.params) + "\n";
  const base::Fd fd(::open(temp.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd || ::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::fsync(fd.get()) != 0 || ::rename(temp.c_str(), path.c_str()) != 0)
    throw base::SystemError("cannot write " + path, errno);
}

class Rank {
 public:
  Rank(const std::string& folder, std::int64_t every, const job::identity::Identity& id)
      : folder_(folder),
        every_(every),
        id_(id),
        store_(job::connect_store(id.address, {id.job, id.generation, job::JobKey::inherited()}, id.rank,
                                  Deadline::in(10s))),
        state_(load_newest(folder)),
        history_(folder + "/rank." + std::to_string(id.rank) + ".jsonl", std::ios::app) {
    base::telemetry::publish_to(base::telemetry::RankPage::this_process(),
                                {.rank = id.rank, .world_size = id.world_size, .job = id.job, .transport = "probe"});
    heartbeat_ = std::make_unique<job::health::Heartbeat>(nullptr, id.rank);
  }

  const State& state() const { return state_; }
  int saves() const { return saves_; }

  void step() {
    const State before = state_;
    const std::int64_t first = before.sample + id_.rank * kSamplesPerRank;
    std::uint64_t sum = 0;
    for (std::int64_t sample = first; sample < first + kSamplesPerRank; ++sample)
      sum += mix(static_cast<std::uint64_t>(sample));
    std::this_thread::sleep_for(3ms);
    store_->set(key("sum", id_.rank), std::to_string(sum), Deadline::in(10s));
    std::uint64_t all = 0;
    for (int rank = 0; rank < id_.world_size; ++rank)
      all += std::strtoull(wait_for(key("sum", rank)).c_str(), nullptr, 10);
    state_.params = mix(before.params ^ all);
    state_.sample += id_.world_size * kSamplesPerRank;
    ++state_.step;
    const bool saves = state_.step % every_ == 0;
    write_line(before, first, saves);
    base::telemetry::RankPage::this_process().steps = state_.step;
    if (saves) save_together();
  }

 private:
  std::string key(const char* what, int rank) const {
    return std::string(what) + "/" + std::to_string(state_.step) + "/" + std::to_string(rank);
  }

  /// Returns the value of a key. Exits if the job ends before the key is set.
  std::string wait_for(const std::string& name) {
    for (;;) {
      if (const auto value = store_->get(name, Deadline::in(50ms))) return *value;
      if (base::telemetry::RankPage::this_process().stop_requested != 0) std::exit(kStoppedExitCode);
    }
  }

  void write_line(const State& before, std::int64_t first, bool saves) {
    char line[400];
    std::snprintf(
        line, sizeof line,
        "{\"mono_ns\": %" PRId64 ", \"gen\": %d, \"step\": %" PRId64
        ", \"rank\": %d, \"world\": %d, \"first_sample\": %" PRId64 ", \"last_sample\": %" PRId64
        ", \"params_before\": \"%016" PRIx64 "\", \"params_after\": \"%016" PRIx64 "\", \"checkpoint\": %s}\n",
        base::monotonic_ns(), id_.generation, before.step, id_.rank, id_.world_size, first, first + kSamplesPerRank - 1,
        before.params, state_.params, saves ? std::to_string(before.sequence + 1).c_str() : "null");
    history_ << line << std::flush;
  }

  void save_together() {
    ++state_.sequence;
    ++saves_;
    if (id_.rank == 0) {
      save(folder_, state_);
      store_->set(key("saved", 0), "1", Deadline::in(10s));
    } else {
      wait_for(key("saved", 0));
    }
    base::telemetry::RankPage::this_process().durable_checkpoint = state_.sequence;
  }

  const std::string folder_;
  const std::int64_t every_;
  const job::identity::Identity id_;
  const std::shared_ptr<job::Store> store_;
  State state_;
  std::ofstream history_;
  std::unique_ptr<job::health::Heartbeat> heartbeat_;
  int saves_ = 0;
};

int run(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::string how = argc > 4 ? argv[4] : "";
  const job::identity::Identity id = job::identity::identify(base::Env::this_process());
  Rank rank(argv[1], std::atoll(argv[3]), id);
  if (how == "hold") {
    std::printf("held %d\n", static_cast<int>(::getpid()));
    std::fflush(stdout);
    ::raise(SIGSTOP);
  }
  while (rank.state().step < std::atoll(argv[2])) {
    rank.step();
    if (how == "exits" && argc > 5 && id.rank == 0 && rank.saves() == std::atoi(argv[5])) return 7;
  }
  base::telemetry::RankPage::this_process().has_left = 1;
  if (id.rank == 0)
    std::printf("params %016" PRIx64 " after step %" PRId64 "\n", rank.state().params, rank.state().step);
  return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const base::Error& error) {
  std::fprintf(stderr, "%s: %s\n", std::string(base::name(error.cause())).c_str(), error.what());
  return base::exit_code(error.cause());
}
