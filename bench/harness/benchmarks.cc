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

constexpr auto kStartTimeout = 120s;
constexpr auto kMeasureTimeout = 120s;
constexpr auto kBaselineTimeout = 20s;  // of the first measurement of a size, 2 to 61 operations
constexpr auto kStopTimeout = 20s;
constexpr std::size_t kLargeBytes = 16 << 20;     // from this size on, a sample is one repetition
constexpr std::size_t kMinMemcpyBytes = 1 << 20;  // smaller copies stay in the private caches of the cores
constexpr std::size_t kMemcpyBytes = 250 << 20;   // memcpy size measured with training steps
constexpr double kProcessBytes = 200 << 20;       // memory of a rank process without the model
constexpr double kSampleSeconds = 5e-3;           // duration of a sample of a small operation
constexpr int kWarmSteps = 2, kLaunches = 3;

/// A temporary folder for pipes and compiled programs, removed by the destructor.
class TempFolder {
 public:
  TempFolder() {
    path_ = (std::filesystem::temp_directory_path() / "lockstep-bench-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) throw base::SystemError("cannot create the directory " + path_, errno);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
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
                           " of memory, but " + host.limited_by() + " has " +
                           size_text(host.available_bytes >> 20 << 20) +
                           " left. Select fewer implementations with --impl");
}

using BenchmarkJobs = std::vector<std::unique_ptr<BenchmarkJob>>;

BenchmarkJobs start_all(const std::vector<Implementation>& implementations, const std::string& folder) {
  BenchmarkJobs jobs;
  for (const Implementation& implementation : implementations)
    jobs.push_back(std::make_unique<BenchmarkJob>(implementation, folder));
  for (const auto& job : jobs) job->wait_until_ready(Deadline::in(kStartTimeout));
  return jobs;
}

/// Starts implementations of a training step, one after the other, because starting takes memory. The first result of
/// each is its number of parameters. Throws Error if these differ.
BenchmarkJobs start_step_jobs(const std::vector<Implementation>& implementations, const std::string& folder,
                              double* parameters) {
  BenchmarkJobs jobs;
  for (const Implementation& implementation : implementations) {
    jobs.push_back(std::make_unique<BenchmarkJob>(implementation, folder));
    const std::vector<double> counts = jobs.back()->wait_until_ready(Deadline::in(kStartTimeout));
    if (counts.size() != 1) continue;  // memcpy
    if (jobs.size() == 1) *parameters = counts[0];
    if (counts[0] != *parameters)
      throw base::Error(base::Cause::kInternal,
                        "bench: " + implementation.name + " has a model of " + std::to_string(counts[0]) +
                            " parameters, " + implementations.front().name + " one of " + std::to_string(*parameters));
  }
  return jobs;
}

void stop_all(BenchmarkJobs& jobs) {
  for (const auto& job : jobs) job->end(Deadline::in(kStopTimeout));
}

/// Measures the jobs in turns: job i with requests[i].
std::vector<Rounds> measure_jobs(const BenchmarkJobs& jobs, const std::vector<std::vector<std::int64_t>>& requests,
                                 const Options& options) {
  std::vector<MeasureFunction> measurements;
  for (std::size_t i = 0; i < jobs.size(); ++i)
    measurements.push_back(
        [&job = *jobs[i], &request = requests[i]] { return job.measure(request, Deadline::in(kMeasureTimeout)); });
  return run_interleaved(measurements, {.rounds = options.rounds});
}

/// Adds a row per result, with ratios to the first. When `memcpy_bytes` is above 0, the last result is that of memcpy,
/// and rows have a ratio to it as well.
void add_rows(ComparisonResult& comparison, const std::vector<std::string>& names, const std::vector<Rounds>& results,
              std::size_t memcpy_bytes) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    ComparisonRow row{names[i], summarize(results[i]), ratio(results[i], results.front()), std::nullopt, false};
    if (memcpy_bytes > 0) row.ratio_to_memcpy = ratio(results[i], results.back());
    row.is_noisy = is_noisy({results[i]}, ComparisonOptions().max_spread);
    comparison.rows.push_back(row);
  }
  // A copy reads and writes each byte.
  if (memcpy_bytes > 0)
    comparison.bandwidth =
        2.0 * comparison.ranks * static_cast<double>(memcpy_bytes) / comparison.rows.back().seconds.median_s;
}

std::vector<std::string> names_of(const BenchmarkJobs& jobs) {
  std::vector<std::string> names;
  for (const auto& job : jobs) names.push_back(job->name());
  return names;
}

/// Returns the request for one size. It repeats a small operation so often within a sample that the resolution of the
/// clock and the scheduler hardly matter.
std::vector<std::int64_t> all_reduce_request(BenchmarkJob& job, std::size_t bytes) {
  const auto size = static_cast<std::int64_t>(bytes);
  if (bytes >= kLargeBytes) {
    job.measure({size, 1, 1}, Deadline::in(kBaselineTimeout));
    return {size, 1, 3};
  }
  const double seconds = median(job.measure({size, 20, 3}, Deadline::in(kBaselineTimeout)));
  return {size, std::clamp(static_cast<std::int64_t>(kSampleSeconds / seconds), std::int64_t{1}, std::int64_t{5000}),
          7};
}

/// Returns the requests for the implementations that can run this size. Reports a baseline that cannot and removes it
/// from `jobs`: on a shared core, some baselines spin until their time slice ends, and time out.
std::vector<std::vector<std::int64_t>> all_reduce_requests(BenchmarkJobs& jobs, std::size_t bytes,
                                                           ResultPrinter& report) {
  std::vector<std::vector<std::int64_t>> requests;
  for (std::size_t i = 0; i < jobs.size();) {
    try {
      requests.push_back(all_reduce_request(*jobs[i], bytes));
      ++i;
    } catch (const base::CommError& error) {
      if (jobs[i]->name().rfind("lockstep", 0) == 0 || i + 1 == jobs.size()) throw;
      report.report_missing(jobs[i]->name() + " with " + size_text(bytes), error.what());
      jobs.erase(jobs.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return requests;
}

void bench_all_reduce(const Options& options, ResultPrinter& report) {
  const TempFolder folder;
  const std::size_t max_bytes = *std::max_element(options.sizes.begin(), options.sizes.end());
  std::vector<Implementation> implementations = all_reduce_implementations(options, max_bytes, folder.path(), report);
  implementations.push_back(memcpy_implementation(options.ranks, max_bytes));
  const double rank_bytes = static_cast<double>(max_bytes) * 2 + (200 << 20);
  require_memory("bench all-reduce", rank_bytes * options.ranks * static_cast<double>(implementations.size()));
  BenchmarkJobs jobs = start_all(implementations, folder.path());
  for (const std::size_t bytes : options.sizes) {
    const auto requests = all_reduce_requests(jobs, bytes, report);
    const auto results = measure_jobs(jobs, requests, options);
    ComparisonResult comparison{
        .what = "all_reduce", .ranks = options.ranks, .bytes = bytes, .model = "", .optimizer = "", .rows = {}};
    add_rows(comparison, names_of(jobs), results, bytes >= kMinMemcpyBytes ? bytes : 0);
    if (bytes < kMinMemcpyBytes) comparison.rows.pop_back();
    report.add(comparison);
  }
  stop_all(jobs);
}

double parameter_bytes(const std::string& model) {
  return 4e6 * (model == "mlp-50m" ? 50.3 : model == "mlp-65m" ? 65.6 : model == "mlp-6m" ? 6.3 : 2);
}

void bench_step(const Options& options, const std::string& model, ResultPrinter& report) {
  const TempFolder folder;
  std::vector<Implementation> implementations = step_implementations(options, model, report);
  double rank_bytes = 2.0 * kMemcpyBytes;
  for (const Implementation& implementation : implementations)
    rank_bytes += implementation.model_copies * parameter_bytes(model) + kProcessBytes;
  require_memory("bench step", rank_bytes * options.ranks);
  implementations.push_back(memcpy_implementation(options.ranks, kMemcpyBytes));
  double parameters = 0;
  BenchmarkJobs jobs = start_step_jobs(implementations, folder.path(), &parameters);
  const std::int64_t steps = parameter_bytes(model) > 1e8 ? 5 : 8;
  std::vector<std::vector<std::int64_t>> requests(jobs.size(), {kWarmSteps, steps});
  requests.back() = {kMemcpyBytes, 1, 3};
  for (std::size_t i = 0; i + 1 < jobs.size(); ++i)
    jobs[i]->measure({10, 1}, Deadline::in(kMeasureTimeout));  // warm up: buckets are laid out and replicas compared
  ComparisonResult comparison{
      .what = "step", .ranks = options.ranks, .bytes = 0, .model = model, .optimizer = options.optimizer, .rows = {}};
  comparison.parameters = static_cast<std::uint64_t>(parameters);
  add_rows(comparison, names_of(jobs), measure_jobs(jobs, requests, options), kMemcpyBytes);
  comparison.rows.pop_back();
  report.add(comparison);
  stop_all(jobs);
}

double time_launch(const Implementation& implementation) {
  const auto begin = std::chrono::steady_clock::now();
  const pid_t pid = start_process(implementation.argv, implementation.env, "");
  int status = 0;
  if (!wait_for(pid, Deadline::in(kStartTimeout), &status) || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw base::CommError(base::Cause::kPeerUnreachable, "bench", -1, -1,
                          implementation.name + " did not start and end ranks of /bin/true successfully");
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void bench_launch(const Options& options, ResultPrinter& report) {
  const TempFolder folder;
  const std::vector<Implementation> implementations = launch_implementations(options, folder.path(), report);
  std::vector<MeasureFunction> measurements;
  std::vector<std::string> names;
  for (const Implementation& implementation : implementations) {
    names.push_back(implementation.name);
    measurements.push_back([&implementation] {
      std::vector<double> seconds;
      for (int i = 0; i < kLaunches; ++i) seconds.push_back(time_launch(implementation));
      return seconds;
    });
  }
  ComparisonResult result{
      .what = "launch", .ranks = options.ranks, .bytes = 0, .model = "", .optimizer = "", .rows = {}};
  add_rows(result, names, run_interleaved(measurements, {.rounds = options.rounds}), 0);
  report.add(result);
}

void bench_memory(const Options& options, ResultPrinter& report) {
  std::vector<std::pair<std::string, double>> values;
  for (const Implementation& implementation :
       memory_implementations(options, report)) {  // one after the other, because together they may not fit
    require_memory("bench memory", 6 * parameter_bytes("mlp-50m") * options.ranks);
    const TempFolder folder;
    BenchmarkJobs jobs = start_all({implementation}, folder.path());
    jobs[0]->measure({3, 1}, Deadline::in(kMeasureTimeout));
    values.emplace_back(implementation.name, static_cast<double>(jobs[0]->pss_bytes()));
    stop_all(jobs);
  }
  report.add_bytes("memory", options.ranks, "mlp-50m", "adamw", values);
}

void bench_arena(const Options& options, ResultPrinter& report) {
  const TempFolder folder;
  constexpr const char* kModel = "mlp-50m";
  BenchmarkJobs jobs = start_all(arena_implementations(kModel), folder.path());
  ComparisonResult comparison{.what = "backward", .ranks = 1, .bytes = 0, .model = kModel, .optimizer = "", .rows = {}};
  add_rows(comparison, names_of(jobs),
           measure_jobs(jobs, std::vector<std::vector<std::int64_t>>(jobs.size(), {kWarmSteps, 5}), options), 0);
  report.add(comparison);
  stop_all(jobs);
  BenchmarkJobs growth = start_all({arena_growth_implementation()}, folder.path());
  const std::vector<double> bytes = growth[0]->measure({2000}, Deadline::in(5 * kMeasureTimeout));
  report.add_bytes("arena_growth", 1, "mlp-6m", "sgd",
                   {{"peak in use, 2000 steps", bytes.at(3)},
                    {"high water after 200 steps", bytes.at(0)},
                    {"high water after 2000 steps", bytes.at(2)}});
  stop_all(growth);
}

}  // namespace

void run_benchmarks(const Options& options, ResultPrinter& report) {
  if (options.benchmark == "all-reduce") bench_all_reduce(options, report);
  if (options.benchmark == "launch") bench_launch(options, report);
  if (options.benchmark == "memory") bench_memory(options, report);
  if (options.benchmark == "arena") bench_arena(options, report);
  if (options.benchmark == "step")
    for (const std::string& model : options.models) bench_step(options, model, report);
}

}  // namespace lockstep::bench
