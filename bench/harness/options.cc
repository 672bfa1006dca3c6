#include "bench/harness/options.h"

#include <CLI/CLI.hpp>

#include "bench/harness/statistics.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/help_layout.h"
#include "lockstep/launch/cli/option_parsing.h"

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
constexpr const char* kMeasurementGroup = "Measurement";
constexpr const char* kBaselineGroup = "Baselines";
constexpr const char* kReportGroup = "Output";

struct RawOptions {
  std::string ranks, sizes, models, optimizer, impls, rounds;
};

void declare_options(CLI::App& app, RawOptions& raw, Options& options) {
  launcher::cli::begin_option_group(app, kMeasurementGroup);
  app.set_help_flag("-h,--help", "show this text");
  const auto option = [&](const char* name, auto& value, const char* type, const char* text) {
    app.add_option(name, value, text)->type_name(type);
  };
  option("-n,--ranks", raw.ranks, "N", "number of ranks, 1 to 64 (default 2; memory: 4; arena: always 1)");
  option("--size", raw.sizes, "LIST",
         "all-reduce: sizes in bytes; K and M are 1024 and 1024^2 (default 8,4K,64K,1M,250M)");
  option("--model", raw.models, "LIST", "step: mlp-50m (default), mlp-65m, mlp-6m, transformer-2m or cnn-1m");
  option("--optimizer", raw.optimizer, "NAME", "step: sgd (default, with momentum 0.9) or adamw");
  option("--impl", raw.impls, "LIST", "measure these implementations only; ratios refer to the first");
  option("--rounds", raw.rounds, "N", "minimum number of rounds, 1 to 1000 (default 7)");
  launcher::cli::begin_option_group(app, kBaselineGroup);
  option("--mpi", options.mpis, "DIR", "another MPI: a directory with bin/mpicc and bin/mpirun; may be repeated");
  option("--python", options.python, "FILE", "a Python interpreter with torch (default: python3 in PATH)");
  launcher::cli::begin_option_group(app, kReportGroup);
  app.add_flag("--json", options.json, "print one JSON object per line on stdout, and the tables on stderr");
  app.footer(
      "All implementations are started once and measured in turns, in rotating order, for several rounds. A ratio is "
      "the "
      "median of the ratios of the rounds. If the rounds differ by more than 15 % (quartiles), more of them are run, "
      "up "
      "to twice as many; results that still vary are marked as noisy. Baselines that are not installed are listed, "
      "with "
      "the way to install them.");
  launcher::cli::set_help_layout(
      app, {.usage = kBenchUsage,
            .examples = {
                {kMeasurementGroup, "lockstep bench step -n 4 --model mlp-6m,cnn-1m --optimizer adamw"},
                {kBaselineGroup, "lockstep bench all-reduce --mpi /opt/mpich"},
                {kReportGroup, "lockstep bench launch --json"},
            }});
}

const Benchmark* find_benchmark(const std::string& name) {
  for (const Benchmark& benchmark : kBenchmarks)
    if (name == benchmark.name) return &benchmark;
  return nullptr;
}

void check_values(const RawOptions& raw, Options& options) {
  const Benchmark& benchmark = *find_benchmark(options.benchmark);
  options.ranks =
      raw.ranks.empty() ? benchmark.ranks : static_cast<int>(base::parse_int_in_range("-n", raw.ranks, 1, kMaxRanks));
  if (options.benchmark == "arena")
    options.ranks = static_cast<int>(base::parse_int_in_range("-n", std::to_string(options.ranks), 1, 1));
  if (!raw.rounds.empty())
    options.rounds = static_cast<int>(base::parse_int_in_range("--rounds", raw.rounds, 1, kMaxRounds));
  for (const std::string& size : base::split(raw.sizes.empty() ? "8,4K,64K,1M,250M" : raw.sizes, ','))
    options.sizes.push_back(parse_size(size));
  options.models = base::split(raw.models.empty() ? "mlp-50m" : raw.models, ',');
  for (const std::string& model : options.models)
    if (std::find(kModels.begin(), kModels.end(), model) == kModels.end())
      throw base::UsageError("--model has " + base::quoted(model, 80) +
                             "; expected mlp-50m, mlp-65m, mlp-6m, transformer-2m or cnn-1m");
  if (!raw.optimizer.empty()) options.optimizer = raw.optimizer;
  if (options.optimizer != "sgd" && options.optimizer != "adamw")
    throw base::UsageError("--optimizer is " + base::quoted(options.optimizer, 80) + "; expected sgd or adamw");
  if (!raw.impls.empty()) options.impls = base::split(raw.impls, ',');
}

/// Rejects options that the benchmark does not use.
void reject_unused_options(const CLI::App& app, const std::string& what) {
  const std::pair<const char*, std::vector<std::string>> users[] = {
      {"--size", {"all-reduce"}},
      {"--model", {"step"}},
      {"--optimizer", {"step"}},
      {"--impl", {"all-reduce", "step", "memory"}},
      {"--mpi", {"all-reduce", "launch"}},
      {"--rounds", {"all-reduce", "step", "launch", "arena"}},
      {"--python", {"step", "launch", "memory"}}};
  for (const auto& [option, allowed] : users)
    if (app.get_option(option)->count() > 0 && std::find(allowed.begin(), allowed.end(), what) == allowed.end())
      throw base::UsageError(std::string("lockstep bench ") + what + " has no option " + option +
                             "; see lockstep bench --help");
}

}  // namespace

// `lockstep bench hosts`, which measures several hosts, is a separate script: lockstep starts it instead of this
// program.
Options parse_options(std::vector<std::string> words) {
  Options options;
  RawOptions raw;
  CLI::App app(kDescription);
  declare_options(app, raw, options);
  if (!words.empty() && words.front() != "--help" && words.front() != "-h") {
    options.benchmark = words.front();
    words.erase(words.begin());
    if (!find_benchmark(options.benchmark))
      throw base::UsageError("lockstep bench: unknown benchmark " + base::quoted(options.benchmark, 80) +
                             "; expected all-reduce, step, launch, memory or arena");
  } else if (words.empty()) {
    throw base::UsageError("lockstep bench: no benchmark given; expected all-reduce, step, launch, memory or arena");
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    options.benchmark.clear();
    options.text = app.help();
    return options;
  } catch (const CLI::ExtrasError&) {
    throw base::UsageError("lockstep bench: unknown option " + base::quoted(app.remaining().front(), 80) +
                           "; see lockstep bench --help");
  } catch (const CLI::ParseError& error) {
    throw base::UsageError("lockstep bench: " + std::string(error.what()) + "; see lockstep bench --help");
  }
  reject_unused_options(app, options.benchmark);
  check_values(raw, options);
  return options;
}

}  // namespace lockstep::bench
