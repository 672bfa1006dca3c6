#include "bench/harness/implementations.h"

#include <algorithm>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::bench {
namespace {

using Words = std::vector<std::string>;
using Env = std::map<std::string, std::string>;

// The environment of all implementations: each rank has one thread, and malloc has the settings of the system, except
// in implementations named "-tuned". An empty value unsets a variable.
const Env kOneThread = {{"OMP_NUM_THREADS", "1"},       {"MKL_NUM_THREADS", "1"},  {"LOCKSTEP_ARENA", ""},
                        {"LOCKSTEP_TRANSPORT", ""},     {"LOCKSTEP_LOG", "quiet"}, {"MALLOC_MMAP_MAX_", ""},
                        {"MALLOC_TRIM_THRESHOLD_", ""}, {"MALLOC_TOP_PAD_", ""},   {"GLOO_SOCKET_IFNAME", "lo"}};
// Makes malloc keep freed memory instead of returning it to the kernel, so that no page is faulted in twice.
const Env kTuned = {
    {"MALLOC_MMAP_MAX_", "0"}, {"MALLOC_TRIM_THRESHOLD_", "100000000000"}, {"MALLOC_TOP_PAD_", "1000000000"}};
const Env kArenaOff = {{"LOCKSTEP_ARENA", "off"}};
const Env kArenaOn = {{"LOCKSTEP_ARENA", "on"}};

Env with(Env env, const Env& more) {
  for (const auto& [name, value] : more) env[name] = value;
  return env;
}

std::string sibling_program(const std::string& name) {
  const std::string own = launcher::process::executable_path();
  return own.substr(0, own.rfind('/') + 1) + name;
}

/// Starts a program under `lockstep run`, with its ranks bound to cores, which is the default of `lockstep run`, or
/// without binding, as torchrun starts them.
Implementation under_lockstep_run(const std::string& name, int ranks, const Words& program, bool bound,
                                  const Env& env) {
  Words words = {sibling_program("lockstep"), "run", "-n", std::to_string(ranks)};
  if (!bound) words.emplace_back("--bind=none");
  words.emplace_back("--");
  words.insert(words.end(), program.begin(), program.end());
  return {.name = name, .argv = words, .env = with(kOneThread, env), .ranks = ranks};
}

Words rank_arguments(Words words) {
  words.insert(words.begin(), {sibling_program("lockstep-bench"), "rank"});
  return words;
}

/// Returns the implementations that --impl names, in its order, or all of them without --impl.
std::vector<Implementation> select_implementations(std::vector<Implementation> all, const Options& options) {
  if (options.impls.empty()) return all;
  std::vector<Implementation> some;
  for (const std::string& name : options.impls) {
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const Implementation& implementation) { return implementation.name == name; });
    if (found == all.end()) {
      std::string names;
      for (const Implementation& implementation : all) names += (names.empty() ? "" : ", ") + implementation.name;
      throw base::UsageError("--impl has unknown implementation " + base::quoted(name, 80) + "; expected " + names);
    }
    some.push_back(*found);
  }
  return some;
}

std::vector<Mpi> find_mpis(const Options& options, const std::string& folder, ResultPrinter& report) {
  std::vector<Mpi> all;
  if (auto mpi = find_mpi("", folder))
    all.push_back(std::move(*mpi));
  else
    report.report_missing("MPI", "apt-get install libopenmpi-dev openmpi-bin, or --mpi DIR");
  for (const std::string& prefix : options.mpis) all.push_back(*find_mpi(prefix, folder));
  return all;
}

std::optional<std::string> find_python_or_report(const Options& options, ResultPrinter& report) {
  auto python = find_python(options.python);
  if (!python) report.report_missing("PyTorch in Python", "pip install torch, or --python FILE");
  return python;
}

/// The memory of a rank in sizes of the model. Fused: parameters and state exist once for all ranks, gradients once per
/// rank. A reducer also has buckets.
double own_copies(const std::string& impl, const std::string& optimizer, int ranks) {
  const double states = optimizer == "sgd" ? 1 : 2;
  if (impl.starts_with("lockstep-fused")) return 1 + (1 + states) / ranks;
  return (impl.starts_with("reducer") ? 3 : 2) + states;
}

/// A step of PyTorch's DistributedDataParallel, started by torchrun.
Implementation pytorch_step(const std::string& python, const std::string& name, const std::string& kind,
                            const std::string& model, const std::string& optimizer, int ranks, const Env& env) {
  return {.name = name,
          .argv = {python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", std::to_string(ranks),
                   baselines_folder() + "/python_step.py", kind, model, optimizer, kPrefix},
          .env = with(kOneThread, env),
          .ranks = ranks,
          .model_copies = optimizer == "sgd" ? 4.0 : 5.0};
}

/// A step of Lockstep from Python. Not bound to cores, so that it has no advantage over torchrun.
Implementation lockstep_python_step(const std::string& python, const std::string& name, const std::string& kind,
                                    const std::string& model, const std::string& optimizer, int ranks) {
  Env env;
  const auto built = std::filesystem::path(launcher::process::executable_path()).parent_path().parent_path() / "python";
  if (std::filesystem::exists(built / "lockstep")) env["PYTHONPATH"] = built;
  Implementation implementation = under_lockstep_run(
      name, ranks, {python, baselines_folder() + "/python_step.py", kind, model, optimizer, kPrefix}, false, env);
  implementation.model_copies = own_copies(kind, optimizer, ranks);
  return implementation;
}

}  // namespace

Implementation memcpy_implementation(int ranks, std::size_t max_bytes) {
  return under_lockstep_run("memcpy", ranks,
                            rank_arguments({"all-reduce", "memcpy", kPrefix, std::to_string(max_bytes)}), true, {});
}

std::vector<Implementation> all_reduce_implementations(const Options& options, std::size_t max_bytes,
                                                       const std::string& folder, ResultPrinter& report) {
  const int ranks = options.ranks;
  const auto words = [&](const std::string& impl) {
    return rank_arguments({"all-reduce", impl, kPrefix, std::to_string(max_bytes)});
  };
  std::vector<Implementation> all = {under_lockstep_run("lockstep", ranks, words("lockstep"), true, {}),
                                     under_lockstep_run("lockstep-ordinary", ranks, words("lockstep"), true, kArenaOff),
                                     under_lockstep_run("gloo", ranks, words("gloo"), false, {})};
  for (const Mpi& mpi : find_mpis(options, folder, report)) {
    Words run = mpirun_arguments(mpi, ranks);
    run.insert(run.end(), {mpi.program, kPrefix, std::to_string(max_bytes)});
    all.push_back({.name = mpi.name, .argv = run, .env = with(kOneThread, mpi.env), .ranks = ranks});
  }
  if (!options.impls.empty())  // measured only on request
    all.push_back(under_lockstep_run("lockstep-tcp", ranks, words("lockstep"), false, {{"LOCKSTEP_TRANSPORT", "tcp"}}));
  return select_implementations(all, options);
}

std::vector<Implementation> step_implementations(const Options& options, const std::string& model,
                                                 ResultPrinter& report) {
  const int ranks = options.ranks;
  const std::string& optimizer = options.optimizer;
  const auto own = [&](const std::string& name, const std::string& impl, const Env& env, bool bound) {
    Implementation implementation =
        under_lockstep_run(name, ranks, rank_arguments({"step", impl, model, optimizer, kPrefix}), bound, env);
    implementation.model_copies = own_copies(impl, optimizer, ranks);
    return implementation;
  };
  std::vector<Implementation> all = {own("lockstep-fused", "lockstep-fused", {}, true),
                                     own("lockstep", "lockstep", {}, true),
                                     own("unsynchronised", "unsynchronised", {}, true),
                                     own("unsynchronised-tuned", "unsynchronised", kTuned, true),
                                     own("reducer", "reducer", {}, false),
                                     own("reducer-tuned", "reducer", kTuned, false)};
  std::vector<Implementation> on_request = {own("lockstep-fused-early", "lockstep-fused-early", {}, true),
                                            own("lockstep-tcp", "lockstep", {{"LOCKSTEP_TRANSPORT", "tcp"}}, true),
                                            own("lockstep-uncompared", "lockstep-uncompared", {},
                                                true),  // compare_replicas_every = 0, then 1; then check_finite
                                            own("lockstep-compared", "lockstep-compared", {}, true),
                                            own("lockstep-finite", "lockstep-finite", {}, true),
                                            own("reducer-views", "reducer-views", {}, false),
                                            own("reducer-views-tuned", "reducer-views", kTuned, false)};
  if (const auto python = find_python_or_report(options, report)) {
    all.push_back(pytorch_step(*python, "pytorch-ddp", "ddp", model, optimizer, ranks, {}));
    all.push_back(pytorch_step(*python, "pytorch-ddp-tuned", "ddp", model, optimizer, ranks, kTuned));
    on_request.push_back(pytorch_step(*python, "pytorch-ddp-views", "ddp-views", model, optimizer, ranks, {}));
    on_request.push_back(
        pytorch_step(*python, "pytorch-ddp-views-tuned", "ddp-views", model, optimizer, ranks, kTuned));
    on_request.push_back(pytorch_step(*python, "pytorch-ddp-best", "ddp-best", model, optimizer, ranks, {}));
    for (const std::string kind : {"lockstep", "lockstep-fused", "backend"})
      on_request.push_back(lockstep_python_step(*python, "python-" + kind, kind, model, optimizer, ranks));
    on_request.push_back(own("lockstep-fused-unbound", "lockstep-fused", {}, false));
  }
  // Configurations that are not a default are measured only on request.
  if (!options.impls.empty()) all.insert(all.end(), on_request.begin(), on_request.end());
  return select_implementations(all, options);
}

std::vector<Implementation> memory_implementations(const Options& options, ResultPrinter& report) {
  const std::string model = "mlp-50m", optimizer = "adamw";
  const auto own = [&](const std::string& impl) {
    return under_lockstep_run(impl, options.ranks, rank_arguments({"step", impl, model, optimizer, kPrefix}), true, {});
  };
  std::vector<Implementation> all = {own("lockstep-fused"), own("lockstep")};
  if (const auto python = find_python_or_report(options, report)) {
    all.push_back(pytorch_step(*python, "pytorch-ddp", "ddp", model, optimizer, options.ranks, {}));
    all.push_back(pytorch_step(*python, "pytorch-ddp-views", "ddp-views", model, optimizer, options.ranks, {}));
    if (!options.impls.empty())  // measured only on request
      all.push_back(
          lockstep_python_step(*python, "python-lockstep-fused", "lockstep-fused", model, optimizer, options.ranks));
  }
  return select_implementations(all, options);
}

std::vector<Implementation> arena_implementations(const std::string& model) {
  const Words words = rank_arguments({"step", "backward-only", model, "sgd", kPrefix});
  return {under_lockstep_run("arena", 1, words, true, kArenaOn),
          under_lockstep_run("malloc", 1, words, true, kArenaOff),
          under_lockstep_run("malloc-tuned", 1, words, true, with(kTuned, kArenaOff))};
}

Implementation arena_growth_implementation() {
  return under_lockstep_run("growth", 1, rank_arguments({"growth", kPrefix}), true, kArenaOn);
}

std::vector<Implementation> launch_implementations(const Options& options, const std::string& folder,
                                                   ResultPrinter& report) {
  const std::string ranks = std::to_string(options.ranks);
  std::vector<Implementation> all = {
      {.name = "lockstep", .argv = {sibling_program("lockstep"), "run", "-n", ranks, "/bin/true"}, .env = kOneThread}};
  if (const auto python = find_python_or_report(options, report))
    all.push_back({.name = "torchrun",
                   .argv = {*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
                            "--no-python", "/bin/true"},
                   .env = kOneThread});
  for (const Mpi& mpi : find_mpis(options, folder, report)) {
    Words run = mpirun_arguments(mpi, options.ranks);
    run.emplace_back("/bin/true");
    all.push_back({.name = mpi.name, .argv = run, .env = with(kOneThread, mpi.env)});
  }
  return all;
}

}  // namespace lockstep::bench
