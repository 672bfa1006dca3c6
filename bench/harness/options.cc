#include "bench/harness/options.h"

#include <CLI/CLI.hpp>

#include "bench/harness/statistics.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::bench {
namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxRounds = 1000;
const std::vector<std::string> kModels = {"mlp-50m", "mlp-65m", "mlp-6m", "transformer-2m", "cnn-1m"};

/// The measurements, and how many ranks are usual.
struct Benchmark {
  const char* name;
  int ranks;
};
constexpr Benchmark kBenchmarks[] = {{"all-reduce", 2}, {"step", 2}, {"launch", 2}, {"memory", 4}, {"arena", 1}};

const char* const kFooter =
    "all-reduce  Group::all_reduce in memory that the ranks share, and in ordinary memory, beside c10d's gloo and MPI\n"
    "step        training steps of one model, beside PyTorch's DistributedDataParallel and c10d::Reducer\n"
    "launch      starting and ending ranks that do nothing, beside torchrun and mpirun\n"
    "memory      of all ranks together while they train, beside DistributedDataParallel\n"
    "arena       one process: forward and backward with the arena beside malloc, and how far the arena grows\n"
    "\n"
    "All implementations are started once and take turns, round after round, in an order that rotates. A ratio is the "
    "median of\n"
    "the rounds' ratios. When rounds differ by more than 15 % (quartiles) there are more of them, up to twice as many; "
    "what is\n"
    "still uneven then is marked noisy. Peers that are not installed are named, with how to get them.\n";

class Formatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "usage: lockstep bench WHAT [options]\n";
  }
};

struct RawOptions {
  std::string ranks, sizes, models, optimizer, impls, rounds;
};

void declare_options(CLI::App& app, RawOptions& raw, Options& options) {
  app.set_help_flag("-h,--help", "show this text");
  app.formatter(std::make_shared<Formatter>());
  const auto option = [&](const char* name, auto& value, const char* type, const char* text) {
    app.add_option(name, value, text)->type_name(type);
  };
  option("-n,--ranks", raw.ranks, "N", "number of ranks, 1 to 64 (default 2; memory 4; arena always 1)");
  option("--size", raw.sizes, "LIST",
         "bytes of an all-reduce, K and M being 1024 and 1024^2 (default 8,4K,64K,1M,250M)");
  option("--model", raw.models, "LIST", "of a step: mlp-50m (default), mlp-65m, mlp-6m, transformer-2m, cnn-1m");
  option("--optimizer", raw.optimizer, "NAME", "of a step: sgd (momentum 0.9, default) or adamw");
  option("--impl", raw.impls, "LIST", "only these implementations; the first is what ratios refer to");
  option("--rounds", raw.rounds, "N", "at least so many rounds, 1 to 1000 (default 7)");
  app.add_flag("--json", options.json, "one object a line on stdout; tables go to stderr");
  app.add_option("--mpi", options.mpis, "one more MPI: a folder with bin/mpicc and bin/mpirun (several times: several)")
      ->type_name("DIR");
  option("--python", options.python, "FILE", "a python that has torch (default: python3 in PATH)");
  app.footer(kFooter);
}

const Benchmark* find_benchmark(const std::string& name) {
  for (const Benchmark& what : kBenchmarks)
    if (name == what.name) return &what;
  return nullptr;
}

void check_values(const RawOptions& raw, Options& options) {
  const Benchmark& what = *find_benchmark(options.what);
  options.ranks =
      raw.ranks.empty() ? what.ranks : static_cast<int>(base::parse_int_in_range("-n", raw.ranks, 1, kMaxRanks));
  if (options.what == "arena")
    options.ranks = static_cast<int>(base::parse_int_in_range("-n", std::to_string(options.ranks), 1, 1));
  if (!raw.rounds.empty())
    options.rounds = static_cast<int>(base::parse_int_in_range("--rounds", raw.rounds, 1, kMaxRounds));
  for (const std::string& size : base::split(raw.sizes.empty() ? "8,4K,64K,1M,250M" : raw.sizes, ','))
    options.sizes.push_back(parse_size(size));
  options.models = base::split(raw.models.empty() ? "mlp-50m" : raw.models, ',');
  for (const std::string& model : options.models)
    if (std::find(kModels.begin(), kModels.end(), model) == kModels.end())
      throw base::UsageError("--model has " + base::quoted(model, 80) +
                             "; allowed are mlp-50m, mlp-65m, mlp-6m, transformer-2m and cnn-1m");
  if (!raw.optimizer.empty()) options.optimizer = raw.optimizer;
  if (options.optimizer != "sgd" && options.optimizer != "adamw")
    throw base::UsageError("--optimizer is " + base::quoted(options.optimizer, 80) + "; allowed are sgd and adamw");
  if (!raw.impls.empty()) options.impls = base::split(raw.impls, ',');
}

/// An option that `what` does not read is an error, not something that is passed over.
void reject_unused_options(const CLI::App& app, const std::string& what) {
  const std::pair<const char*, std::vector<std::string>> users[] = {
      {"--size", {"all-reduce"}},
      {"--model", {"step"}},
      {"--optimizer", {"step"}},
      {"--impl", {"all-reduce", "step"}},
      {"--mpi", {"all-reduce", "launch"}},
      {"--rounds", {"all-reduce", "step", "launch", "arena"}},
      {"--python", {"step", "launch", "memory"}}};
  for (const auto& [option, allowed] : users)
    if (app.get_option(option)->count() > 0 && std::find(allowed.begin(), allowed.end(), what) == allowed.end())
      throw base::UsageError(std::string("lockstep bench ") + what + " has no option " + option +
                             "; lockstep bench --help shows which has");
}

}  // namespace

// `lockstep bench hosts`, which measures several hosts, is a script of its own: the program lockstep would start it
// instead of this one.
Options parse_options(std::vector<std::string> words) {
  Options options;
  RawOptions raw;
  CLI::App app("Measures this machine: Lockstep beside its peers.");
  declare_options(app, raw, options);
  if (!words.empty() && words.front() != "--help" && words.front() != "-h") {
    options.what = words.front();
    words.erase(words.begin());
    if (!find_benchmark(options.what))
      throw base::UsageError("lockstep bench: what to measure is " + base::quoted(options.what, 80) +
                             "; allowed are all-reduce, step, launch, memory and arena");
  } else if (words.empty()) {
    throw base::UsageError(
        "lockstep bench: nothing to measure is named; allowed are all-reduce, step, launch, memory and arena");
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    options.what.clear();
    options.text = app.help();
    return options;
  } catch (const CLI::ExtrasError&) {
    throw base::UsageError("lockstep bench: " + base::quoted(app.remaining().front(), 80) +
                           " is no option; lockstep bench --help shows those that are allowed");
  } catch (const CLI::ParseError& error) {
    throw base::UsageError("lockstep bench: " + std::string(error.what()) +
                           "; lockstep bench --help shows what is allowed");
  }
  reject_unused_options(app, options.what);
  check_values(raw, options);
  return options;
}

}  // namespace lockstep::bench
