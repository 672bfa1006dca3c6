#include "bench/harness/benchmarks.h"

#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "bench/harness/implementations.h"
#include "bench/harness/interleave.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_memory.h"

namespace lockstep::bench {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

constexpr auto kStart = 120s;
constexpr auto kTurn = 120s;
constexpr auto kPeerLimit = 20s;  // the first turn of a size, 5 to 60 operations
constexpr auto kEnd = 20s;
constexpr std::size_t kLarge = 16 << 20;     // from here on one repetition is a sample
constexpr std::size_t kYardstick = 1 << 20;  // smaller copies stay in the cores' own caches
constexpr std::size_t kMemory = 250 << 20;   // the yardstick beside training steps
constexpr double kLibrary = 200 << 20;       // of a rank's own, libtorch and what it allocates
constexpr double kSample = 5e-3;             // seconds that a sample of a small operation takes
constexpr int kWarmSteps = 2, kLaunches = 3;

/// A folder for pipes and what is compiled, gone with it.
class Folder {
 public:
  Folder() {
    path_ = (std::filesystem::temp_directory_path() / "lockstep-bench-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) throw base::SystemError("cannot make the folder " + path_, errno);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void require_memory(const std::string& what, double bytes) {
  const auto host = base::HostMemory::now();
  if (static_cast<double>(host.available_bytes) < bytes)
    throw base::UsageError(what + " needs about " + size_text(static_cast<std::size_t>(bytes) >> 20 << 20) +
                           " of memory; " + host.limited_by + " has " + size_text(host.available_bytes >> 20 << 20) +
                           " left: fewer implementations (--impl) need less");
}

using Jobs = std::vector<std::unique_ptr<Job>>;

Jobs start_all(const std::vector<Entrant>& entrants, const std::string& folder) {
  Jobs jobs;
  for (const Entrant& entrant : entrants) jobs.push_back(std::make_unique<Job>(entrant, folder));
  for (const auto& job : jobs) job->wait_ready(Deadline::in(kStart));
  return jobs;
}

/// Those that train: each says first how many parameters it has. One after the other, since starting takes memory.
Jobs start_training(const std::vector<Entrant>& entrants, const std::string& folder, double* parameters) {
  Jobs jobs;
  for (const Entrant& entrant : entrants) {
    jobs.push_back(std::make_unique<Job>(entrant, folder));
    const std::vector<double> said = jobs.back()->wait_ready(Deadline::in(kStart));
    if (said.size() != 1) continue;  // memcpy
    if (jobs.size() == 1) *parameters = said[0];
    if (said[0] != *parameters)
      throw base::Error(base::Cause::kInternal, "bench: " + entrant.name + " has a model of " +
                                                    std::to_string(said[0]) + " parameters, " + entrants.front().name +
                                                    " one of " + std::to_string(*parameters));
  }
  return jobs;
}

void end_all(Jobs& jobs) {
  for (const auto& job : jobs) job->end(Deadline::in(kEnd));
}

/// Turns of `jobs`, each with its own order.
std::vector<Rounds> race_jobs(const Jobs& jobs, const std::vector<std::vector<std::int64_t>>& orders,
                              const Options& options) {
  std::vector<TakeTurn> turns;
  for (std::size_t i = 0; i < jobs.size(); ++i)
    turns.push_back([&job = *jobs[i], &order = orders[i]] { return job.turn(order, Deadline::in(kTurn)); });
  return race(turns, {.rounds = options.rounds});
}

/// Rows, with ratios to the first that is not memcpy, which is the last of the results when `bytes` says how much it
/// copied.
void add_rows(Race& race, const std::vector<std::string>& names, const std::vector<Rounds>& results,
              std::size_t memcpy_bytes) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    Row row{names[i], summarize(results[i]), ratio(results[i], results.front()), std::nullopt, false};
    if (memcpy_bytes > 0) row.ratio_to_memcpy = ratio(results[i], results.back());
    row.noisy = noisy({results[i]}, RaceOptions().max_spread);
    race.rows.push_back(row);
  }
  // Reads and writes count.
  if (memcpy_bytes > 0)
    race.bandwidth = 2.0 * race.ranks * static_cast<double>(memcpy_bytes) / race.rows.back().seconds.median_s;
}

std::vector<std::string> names_of(const Jobs& jobs) {
  std::vector<std::string> names;
  for (const auto& job : jobs) names.push_back(job->name());
  return names;
}

/// A small operation is repeated until a sample is long enough for the clock and the scheduler not to matter.
std::vector<std::int64_t> all_reduce_order(Job& job, std::size_t bytes) {
  const auto size = static_cast<std::int64_t>(bytes);
  if (bytes >= kLarge) {
    job.turn({size, 1, 1}, Deadline::in(kPeerLimit));
    return {size, 1, 3};
  }
  const double once = median(job.turn({size, 20, 3}, Deadline::in(kPeerLimit)));
  return {size, std::clamp(static_cast<std::int64_t>(kSample / once), std::int64_t{1}, std::int64_t{5000}), 7};
}

/// The orders for those that can do this size. A peer that cannot (some spin until a rank's turn on a shared core is
/// over) leaves the race.
std::vector<std::vector<std::int64_t>> all_reduce_orders(Jobs& jobs, std::size_t bytes, Report& report) {
  std::vector<std::vector<std::int64_t>> orders;
  for (std::size_t i = 0; i < jobs.size();) {
    try {
      orders.push_back(all_reduce_order(*jobs[i], bytes));
      ++i;
    } catch (const base::CommError& error) {
      if (jobs[i]->name().rfind("lockstep", 0) == 0 || i + 1 == jobs.size()) throw;
      report.missing(jobs[i]->name() + " with " + size_text(bytes), error.what());
      jobs.erase(jobs.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return orders;
}

void bench_all_reduce(const Options& options, Report& report) {
  const Folder folder;
  const std::size_t max_bytes = *std::max_element(options.sizes.begin(), options.sizes.end());
  std::vector<Entrant> entrants = all_reduce_entrants(options, max_bytes, folder.path(), report);
  entrants.push_back(memcpy_entrant(options.ranks, max_bytes));
  const double rank_bytes = static_cast<double>(max_bytes) * 2 + (200 << 20);
  require_memory("bench all-reduce", rank_bytes * options.ranks * static_cast<double>(entrants.size()));
  Jobs jobs = start_all(entrants, folder.path());
  for (const std::size_t bytes : options.sizes) {
    const auto orders = all_reduce_orders(jobs, bytes, report);
    const auto results = race_jobs(jobs, orders, options);
    Race race{.what = "all_reduce", .ranks = options.ranks, .bytes = bytes, .model = "", .optimizer = "", .rows = {}};
    add_rows(race, names_of(jobs), results, bytes >= kYardstick ? bytes : 0);
    if (bytes < kYardstick) race.rows.pop_back();
    report.add(race);
  }
  end_all(jobs);
}

double parameter_bytes(const std::string& model) {
  return 4e6 * (model == "mlp-50m" ? 50.3 : model == "mlp-65m" ? 65.6 : model == "mlp-6m" ? 6.3 : 2);
}

void bench_step(const Options& options, const std::string& model, Report& report) {
  const Folder folder;
  std::vector<Entrant> entrants = step_entrants(options, model, report);
  double rank_bytes = 2.0 * kMemory;
  for (const Entrant& entrant : entrants) rank_bytes += entrant.copies * parameter_bytes(model) + kLibrary;
  require_memory("bench step", rank_bytes * options.ranks);
  entrants.push_back(memcpy_entrant(options.ranks, kMemory));
  double parameters = 0;
  Jobs jobs = start_training(entrants, folder.path(), &parameters);
  const std::int64_t steps = parameter_bytes(model) > 1e8 ? 5 : 8;
  std::vector<std::vector<std::int64_t>> orders(jobs.size(), {kWarmSteps, steps});
  orders.back() = {kMemory, 1, 3};
  for (std::size_t i = 0; i + 1 < jobs.size(); ++i)
    jobs[i]->turn({10, 1}, Deadline::in(kTurn));  // buckets are laid out, replicas compared
  Race race{
      .what = "step", .ranks = options.ranks, .bytes = 0, .model = model, .optimizer = options.optimizer, .rows = {}};
  race.parameters = static_cast<std::uint64_t>(parameters);
  add_rows(race, names_of(jobs), race_jobs(jobs, orders, options), kMemory);
  race.rows.pop_back();
  report.add(race);
  end_all(jobs);
}

double seconds_of(const Entrant& entrant) {
  const auto begin = std::chrono::steady_clock::now();
  const pid_t pid = start(entrant.argv, entrant.env, "");
  int status = 0;
  if (!wait_for(pid, Deadline::in(kStart), &status) || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw base::CommError(base::Cause::kPeerUnreachable, "bench", -1, -1,
                          entrant.name + " did not start and end two ranks of /bin/true");
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void bench_launch(const Options& options, Report& report) {
  const Folder folder;
  const std::vector<Entrant> entrants = launch_entrants(options, folder.path(), report);
  std::vector<TakeTurn> turns;
  std::vector<std::string> names;
  for (const Entrant& entrant : entrants) {
    names.push_back(entrant.name);
    turns.push_back([&entrant] {
      std::vector<double> seconds;
      for (int i = 0; i < kLaunches; ++i) seconds.push_back(seconds_of(entrant));
      return seconds;
    });
  }
  Race result{.what = "launch", .ranks = options.ranks, .bytes = 0, .model = "", .optimizer = "", .rows = {}};
  add_rows(result, names, race(turns, {.rounds = options.rounds}), 0);
  report.add(result);
}

void bench_memory(const Options& options, Report& report) {
  std::vector<std::pair<std::string, double>> values;
  for (const Entrant& entrant : memory_entrants(options, report)) {  // one after the other: all at once would not fit
    require_memory("bench memory", 6 * parameter_bytes("mlp-50m") * options.ranks);
    const Folder folder;
    Jobs jobs = start_all({entrant}, folder.path());
    jobs[0]->turn({3, 1}, Deadline::in(kTurn));
    values.emplace_back(entrant.name, static_cast<double>(jobs[0]->pss_bytes()));
    end_all(jobs);
  }
  report.add_bytes("memory", options.ranks, "mlp-50m", "adamw", values);
}

void bench_arena(const Options& options, Report& report) {
  const Folder folder;
  constexpr const char* kModel = "mlp-50m";
  Jobs jobs = start_all(arena_entrants(kModel), folder.path());
  Race race{.what = "backward", .ranks = 1, .bytes = 0, .model = kModel, .optimizer = "", .rows = {}};
  add_rows(race, names_of(jobs),
           race_jobs(jobs, std::vector<std::vector<std::int64_t>>(jobs.size(), {kWarmSteps, 5}), options), 0);
  report.add(race);
  end_all(jobs);
  Jobs growth = start_all({growth_entrant()}, folder.path());
  const std::vector<double> seen = growth[0]->turn({2000}, Deadline::in(5 * kTurn));
  report.add_bytes("arena_growth", 1, "mlp-6m", "sgd",
                   {{"most in use at once, 2000 steps", seen.at(3)},
                    {"high water after 200 steps", seen.at(0)},
                    {"high water after 2000 steps", seen.at(2)}});
  end_all(growth);
}

}  // namespace

void run_benchmarks(const Options& options, Report& report) {
  if (options.what == "all-reduce") bench_all_reduce(options, report);
  if (options.what == "launch") bench_launch(options, report);
  if (options.what == "memory") bench_memory(options, report);
  if (options.what == "arena") bench_arena(options, report);
  if (options.what == "step")
    for (const std::string& model : options.models) bench_step(options, model, report);
}

}  // namespace lockstep::bench
