#include "tests/schedules/explore.h"

#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string_view>

#include "lockstep/comm/shm/shm.h"
#include "tests/support/rank_threads.h"

namespace lockstep::schedules {
namespace {

using comm::arena::Arena;
using comm::shm::LocalPeer;
using comm::shm::LocalPeers;
using tests::all_ranks;

std::uint64_t num_schedules = 2000;
std::uint64_t only_seed = 0;  // 0: all

constexpr std::uint64_t kCalibrationSchedules = 32;
// Control blocks are never freed, so each arena serves this many schedules.
constexpr std::uint64_t kSchedulesPerArena = 200;
constexpr std::size_t kArenaBytes = std::size_t{256} << 20;

/// A store for fibers: get() lets the others run.
class FiberStore final : public job::Store {
 public:
  void set(std::string_view key, std::string_view value, base::Deadline) override {
    values_.insert_or_assign(std::string(key), std::string(value));
  }
  std::optional<std::string> get(std::string_view key, base::Deadline deadline) override {
    for (;;) {
      if (auto value = find(key, deadline)) return value;
      yield();
    }
  }
  std::optional<std::string> find(std::string_view key, base::Deadline) override {
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  std::int64_t add(std::string_view, std::int64_t, base::Deadline) override { throw std::logic_error("not used"); }
  std::string compare_set(std::string_view, std::string_view, std::string_view, base::Deadline) override {
    throw std::logic_error("not used");
  }

 private:
  std::map<std::string, std::string, std::less<>> values_;
};

/// The arena and the connections of the ranks.
class Host {
 public:
  explicit Host(int size) : size_(size), sockets_(static_cast<std::size_t>(size * size)) {
    arena_ = std::make_unique<Arena>(kArenaBytes, kArenaBytes);
  }

  Arena& arena() const { return *arena_; }
  /// Not owned, because a killed rank never releases it, and its sockets must be closed.
  std::shared_ptr<const LocalPeers> peers_of(int rank) {
    if (peers_.empty()) connect();
    return {peers_[static_cast<std::size_t>(rank)].get(), [](const auto*) {}};
  }
  /// Closes the connections of `rank`.
  void close(int rank) {
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank) ::shutdown(socket(rank, peer), SHUT_RDWR);
    was_closed_ = true;
  }
  /// Makes new connections if some were closed.
  void renew() {
    if (std::exchange(was_closed_, false)) peers_.clear();
  }

 private:
  int& socket(int rank, int peer) { return sockets_[static_cast<std::size_t>(rank * size_ + peer)]; }

  void connect() {
    std::vector<std::map<int, LocalPeer>> all(static_cast<std::size_t>(size_));
    const auto memory = tests::memory_of(*arena_);
    for (int a = 0; a < size_; ++a)
      for (int b = 0; b < a; ++b) {
        int ends[2];
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
        socket(a, b) = ends[0];
        socket(b, a) = ends[1];
        all[static_cast<std::size_t>(a)][b] = {base::Fd(ends[0]), memory};
        all[static_cast<std::size_t>(b)][a] = {base::Fd(ends[1]), memory};
      }
    for (int rank = 0; rank < size_; ++rank)
      peers_.push_back(std::make_unique<LocalPeers>(*arena_, all_ranks(size_), rank,
                                                    std::move(all[static_cast<std::size_t>(rank)]),
                                                    comm::shm::SpinPolicy{.spins = 1, .yields = 0}));
  }

  const int size_;
  std::unique_ptr<Arena> arena_;
  std::vector<int> sockets_;
  std::vector<std::unique_ptr<const LocalPeers>> peers_;
  bool was_closed_ = false;
};

std::string name_of_case() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

/// Runs schedules with `one(seed, options)` until one fails.
template <typename One>
void run_all(Options options, const One& one) {
  const auto began = std::chrono::steady_clock::now();
  std::uint64_t points = 0, switches = 0, killed = 0, length = 0;
  const Options plain{.num_ranks = options.num_ranks};
  for (std::uint64_t seed = 1; seed <= kCalibrationSchedules; ++seed) length += one(seed, plain).points;
  options.length = length / kCalibrationSchedules;
  const std::uint64_t first = only_seed ? only_seed : 1, last = only_seed ? only_seed : num_schedules;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    const Outcome outcome = one(seed, options);
    points += outcome.points;
    switches += outcome.switches;
    killed += outcome.killed >= 0 ? 1 : 0;
    if (outcome.failure.empty()) continue;
    ADD_FAILURE() << outcome.failure << (outcome.killed >= 0 ? "; killed: rank " + std::to_string(outcome.killed) : "")
                  << "; schedule " << seed - first + 1 << "; repeat it with --gtest_filter=" << name_of_case()
                  << " --seed=" << seed;
    return;
  }
  const std::uint64_t n = last - first + 1;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::printf("%s: %llu schedules, on average %llu points and %llu switches; %llu with a killed rank; %.1f s\n",
              name_of_case().c_str(), static_cast<unsigned long long>(n), static_cast<unsigned long long>(points / n),
              static_cast<unsigned long long>(switches / n), static_cast<unsigned long long>(killed), seconds);
}

}  // namespace

std::unique_ptr<comm::shm::ControlBlocks> Rank::connect(const std::string& name) const {
  job::PrefixStore prefixed(name, store);
  return comm::shm::ControlBlocks::connect(peers, prefixed, all_ranks(size), rank, base::Deadline::never());
}

std::shared_ptr<comm::Transport> Rank::transport(const std::string& name) const {
  return comm::shm::make_shm_transport({.local_peers = peers,
                                        .store = std::make_shared<job::PrefixStore>(name, store),
                                        .members = all_ranks(size),
                                        .rank = rank,
                                        .timeout = std::chrono::hours(1)});
}

at::Tensor Rank::tensor(std::int64_t count, float value) const {
  auto* data = static_cast<float*>(arena.allocate(static_cast<std::size_t>(count) * sizeof(float)));
  std::fill(data, data + count, value);
  return at::from_blob(data, {count}, [&arena = arena](void* block) { arena.free(block); }, at::kFloat);
}

void explore(Options options, const std::function<void(Rank&)>& body, const Extra& extra) {
  std::unique_ptr<Host> host;
  std::uint64_t in_this_arena = kSchedulesPerArena;
  run_all(options, [&](std::uint64_t seed, const Options& chosen) {
    if (in_this_arena++ >= kSchedulesPerArena) {
      host = std::make_unique<Host>(options.num_ranks);
      in_this_arena = 1;
    }
    host->renew();
    const auto store = std::make_shared<FiberStore>();
    bool was_killed = false;
    std::vector<std::function<void(Fiber&)>> bodies;
    for (int rank = 0; rank < options.num_ranks; ++rank)
      bodies.emplace_back([&, rank](Fiber& fiber) {
        Rank self{.fiber = fiber,
                  .rank = rank,
                  .size = options.num_ranks,
                  .arena = host->arena(),
                  .peers = host->peers_of(rank),
                  .store = store,
                  .leave = [&, rank] { host->close(rank); },
                  .may_fail = [&] { return was_killed; }};
        body(self);
      });
    if (extra) bodies.emplace_back(extra);
    return run(seed, chosen, bodies, [&](int rank) {
      was_killed = true;
      host->close(rank);
    });
  });
}

void explore_fibers(Options options, const std::vector<std::function<void(Fiber&)>>& bodies,
                    const std::function<void()>& prepare) {
  run_all(options, [&](std::uint64_t seed, const Options& chosen) {
    prepare();
    return run(seed, chosen, bodies, [](int) {});
  });
}

}  // namespace lockstep::schedules

/// Flags besides those of GoogleTest: --schedules=N for each case, and --seed=S to run one schedule only.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const auto number = [&](std::string_view flag, std::uint64_t& value) {
      if (!argument.starts_with(flag)) return false;
      const auto [end, error] =
          std::from_chars(argument.data() + flag.size(), argument.data() + argument.size(), value);
      return error == std::errc() && end == argument.data() + argument.size();
    };
    using lockstep::schedules::num_schedules, lockstep::schedules::only_seed;
    if (number("--schedules=", num_schedules) || number("--seed=", only_seed)) continue;
    std::fprintf(stderr, "unknown argument %s; expected --schedules=N or --seed=S\n", argv[i]);
    return 2;
  }
  return RUN_ALL_TESTS();
}
