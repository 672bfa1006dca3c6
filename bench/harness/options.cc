#include "bench/harness/options.h"

#include <algorithm>
#include <array>

#include "bench/harness/statistics.h"
#include "lockstep/launch/cli/option_table.h"

namespace lockstep::bench {
namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxRounds = 1000;
const std::vector<std::string> kModels = {"mlp-50m", "mlp-65m", "mlp-6m", "transformer-2m", "cnn-1m"};

/// The benchmarks, with their default number of ranks.
struct Benchmark {
  const char* name;
  int ranks;
};
constexpr Benchmark kBenchmarks[] = {{"all-reduce", 2}, {"step", 2}, {"launch", 2}, {"memory", 4}, {"arena", 1}};

const char* const kDescription =
    "Measures this machine: Lockstep compared with Gloo, MPI and PyTorch.\n"
    "\n"
    "WHAT is one of:\n"
    "  all-reduce  Group::all_reduce in shared and in ordinary memory, compared with c10d's Gloo and MPI\n"
    "  step        training steps of one model, compared with DistributedDataParallel and c10d::Reducer\n"
    "  launch      starting and ending ranks that do nothing, compared with torchrun and mpirun\n"
    "  memory      memory of all ranks during training, compared with DistributedDataParallel\n"
    "  arena       one process: forward and backward with the arena and with malloc; the arena's growth";

const char* const kBenchUsage = "lockstep bench WHAT [options]";

/// The options, of which some have one text for several values.
struct RawOptions {
  std::string sizes = "8,4K,64K,1M,250M", models = kModels.front(), impls;
};

launcher::cli::OptionType<std::string> list() {
  return launcher::cli::text("LIST", "names or numbers, separated by commas");
}

void add_options(launcher::cli::OptionTable& table, RawOptions& raw, Options& options) {
  table.group("Measurement", "lockstep bench step -n 4 --model mlp-6m,cnn-1m --optimizer adamw");
  table.option("-n,--ranks", options.ranks, launcher::cli::integer(1, kMaxRanks),
               "number of ranks, 1 to 64 (default 2; memory: 4; arena: always 1)");
  table.option("--size", raw.sizes, list(),
               "all-reduce: sizes in bytes; K and M are 1024 and 1024^2 (default {default})");
  table.option("--model", raw.models, list(), "step: {default} (default), mlp-65m, mlp-6m, transformer-2m or cnn-1m");
  table.option("--optimizer", options.optimizer, launcher::cli::choice_of("NAME", std::array{"sgd", "adamw"}),
               "step: {default} (default, with momentum 0.9) or adamw");
  table.option("--impl", raw.impls, list(), "measure these implementations only; ratios refer to the first");
  table.option("--rounds", options.rounds, launcher::cli::integer(1, kMaxRounds),
               "minimum number of rounds, 1 to 1000 (default {default})");
  table.group("Baselines", "lockstep bench all-reduce --mpi /opt/mpich");
  table.list("--mpi", options.mpis, launcher::cli::text("DIR", "a directory"),
             "another MPI: a directory with bin/mpicc and bin/mpirun; may be repeated");
  table.option("--python", options.python, launcher::cli::text("FILE", "a Python interpreter"),
               "a Python interpreter with torch (default: python3 in PATH)");
  table.group("Output", "lockstep bench launch --json");
  table.flag("--json", options.json, "print one JSON object per line on stdout, and the tables on stderr");
  table.footer(
      "All implementations are started once and measured in turns, in rotating order, for several rounds. A ratio is "
      "the median of the ratios of the rounds. If the rounds differ by more than 15 % (quartiles), more of them are "
      "run, up to twice as many; results that still vary are marked as noisy. Baselines that are not installed are "
      "listed, with the way to install them.");
}

const Benchmark* find_benchmark(const std::string& name) {
  for (const Benchmark& benchmark : kBenchmarks)
    if (name == benchmark.name) return &benchmark;
  return nullptr;
}

void check_values(const RawOptions& raw, bool has_ranks, Options& options) {
  if (!has_ranks) options.ranks = find_benchmark(options.benchmark)->ranks;
  if (options.benchmark == "arena")
    options.ranks = static_cast<int>(base::parse_int_in_range("-n", std::to_string(options.ranks), 1, 1));
  for (const std::string& size : base::split(raw.sizes, ',')) options.sizes.push_back(parse_size(size));
  options.models = base::split(raw.models, ',');
  for (const std::string& model : options.models)
    if (std::find(kModels.begin(), kModels.end(), model) == kModels.end())
      throw base::UsageError("--model has " + base::quoted(model, 80) + "; expected " + base::alternatives(kModels));
  if (!raw.impls.empty()) options.impls = base::split(raw.impls, ',');
}

/// Rejects options that the benchmark does not use.
void reject_unused_options(const launcher::cli::OptionTable& table, const std::string& what) {
  const std::pair<const char*, std::vector<std::string>> users[] = {
      {"--size", {"all-reduce"}},
      {"--model", {"step"}},
      {"--optimizer", {"step"}},
      {"--impl", {"all-reduce", "step", "memory"}},
      {"--mpi", {"all-reduce", "launch"}},
      {"--rounds", {"all-reduce", "step", "launch", "arena"}},
      {"--python", {"step", "launch", "memory"}}};
  for (const auto& [option, allowed] : users)
    if (table.is_given(option) && std::find(allowed.begin(), allowed.end(), what) == allowed.end())
      throw base::UsageError(std::string("lockstep bench ") + what + " has no option " + option +
                             "; see lockstep bench --help");
}

}  // namespace

// `lockstep bench hosts`, which measures several hosts, is a separate script: lockstep starts it instead of this
// program.
Options parse_options(std::vector<std::string> words) {
  Options options;
  RawOptions raw;
  launcher::cli::OptionTable table("lockstep bench", kBenchUsage, kDescription);
  add_options(table, raw, options);
  const std::string expected = "; expected all-reduce, step, launch, memory or arena";
  if (words.empty()) throw table.error("no benchmark given" + expected);
  if (words.front() != "--help" && words.front() != "-h") {
    options.benchmark = words.front();
    words.erase(words.begin());
    if (!find_benchmark(options.benchmark))
      throw table.error("unknown benchmark " + base::quoted(options.benchmark, 80) + expected);
  }
  if (!table.parse_options_only(std::move(words))) {
    options.benchmark.clear();
    options.text = table.help();
    return options;
  }
  reject_unused_options(table, options.benchmark);
  check_values(raw, table.is_given("-n"), options);
  return options;
}

}  // namespace lockstep::bench
