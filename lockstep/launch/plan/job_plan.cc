#include "lockstep/launch/plan/job_plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <optional>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/option_table.h"

namespace lockstep::launcher::plan {
namespace {

bool begins_with_one_of(std::string_view name, const auto& prefixes) {
  return std::ranges::any_of(prefixes, [&](const char* prefix) { return name.rfind(prefix, 0) == 0; });
}

bool is_one_of(std::string_view name, const auto& names) { return std::ranges::find(names, name) != names.end(); }

/// Returns the value of LOCKSTEP_TIMEOUT: the seconds in `limit` + `later`, or 0 if there is no limit.
std::string seconds(std::chrono::milliseconds limit, std::chrono::milliseconds later) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g",
                limit.count() == 0 ? 0 : static_cast<double>((limit + later).count()) / 1000);
  return text;
}

base::Env env_of(const process::Environment& environment) {
  return base::Env([&](const char* name) -> base::Env::Value {
    const auto value = process::find_variable(environment, name);
    return value ? base::Env::Value(*value) : std::nullopt;
  });
}

process::Environment shared_environment(const cli::RunOptions& options, const LaunchContext& context,
                                        const std::vector<Node>& nodes) {
  const int num_ranks = count_ranks(nodes);
  const std::string size = std::to_string(num_ranks);
  const std::string num_nodes = std::to_string(nodes.size());
  process::Environment environment = {
      "LOCKSTEP_WORLD_SIZE=" + size,
      "LOCKSTEP_NUM_NODES=" + num_nodes,
      "LOCKSTEP_STORE=" + base::net::to_string(context.store),
      "LOCKSTEP_JOB=" + context.job,
      "LOCKSTEP_GENERATION=" + std::to_string(context.generation),
      "WORLD_SIZE=" + size,
      "GROUP_WORLD_SIZE=" + num_nodes,
      "ROLE_NAME=default",
      "ROLE_WORLD_SIZE=" + size,
      "TORCHELASTIC_RUN_ID=" + context.job,
      "TORCHELASTIC_USE_AGENT_STORE=False",
      "TORCHELASTIC_RESTART_COUNT=" + std::to_string(context.generation),
      "TORCHELASTIC_MAX_RESTARTS=" + std::to_string(options.max_restarts),
      "MASTER_ADDR=" + context.master.host,
      "MASTER_PORT=" + std::to_string(context.master.port),
  };
  if (!options.transport.empty()) environment.push_back("LOCKSTEP_TRANSPORT=" + options.transport);
  if (!options.name.empty()) environment.push_back("LOCKSTEP_NAME=" + options.name);
  if (options.trace) environment.push_back("LOCKSTEP_TRACE=1");
  if (!options.inject.empty()) environment.push_back("LOCKSTEP_INJECT=" + options.inject);
  if (options.join_timeout)
    environment.push_back("LOCKSTEP_JOIN_TIMEOUT=" + seconds(*options.join_timeout, std::chrono::seconds(0)));
  if (options.host_timeout)
    environment.push_back("LOCKSTEP_HOST_TIMEOUT=" + seconds(*options.host_timeout, std::chrono::seconds(0)));
  // The ranks' time limit is longer than the launcher's, so that the launcher, which monitors all ranks, acts first.
  if (options.hang_timeout || !process::find_variable(context.environment, "LOCKSTEP_TIMEOUT"))
    environment.push_back("LOCKSTEP_TIMEOUT=" + seconds(health_limits(options, {}).hang, base::kLauncherHeadStart));
  // The prefix of each line takes some columns of the terminal.
  std::size_t widest = 0;
  for (const Node& node : nodes)
    widest = std::max(widest, rank_prefix(num_ranks - 1, nodes.size() > 1 ? node.name : "").size());
  const int columns = context.columns - static_cast<int>(widest);
  if (columns > 0) environment.push_back("LOCKSTEP_TERMINAL=" + std::to_string(columns));
  // Python buffers its output when it writes to a pipe.
  if (!process::find_variable(context.environment, "PYTHONUNBUFFERED")) environment.push_back("PYTHONUNBUFFERED=1");
  return environment;
}

/// Returns the variables of all ranks of a host. They name the interface for Gloo and NCCL, because the host's name may
/// resolve to a loopback address on several hosts, and to one that others reach on a single one.
process::Environment node_environment(std::size_t number, const Node& node, const cli::RunOptions& options,
                                      const process::Environment& inherited) {
  const std::string size = std::to_string(node.ranks), rank = std::to_string(number);
  process::Environment environment = {"LOCKSTEP_LOCAL_WORLD_SIZE=" + size, "LOCKSTEP_NODE_RANK=" + rank,
                                      "LOCAL_WORLD_SIZE=" + size, "GROUP_RANK=" + rank, "NODE_RANK=" + rank};
  if (node.interface.empty()) {
    if (!process::find_variable(inherited, "GLOO_SOCKET_IFNAME")) environment.push_back("GLOO_SOCKET_IFNAME=lo");
    return environment;
  }
  for (const char* name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"})
    if (!process::find_variable(inherited, name)) environment.push_back(std::string(name) + "=" + node.interface);
  if (!options.interface.empty() || !node.wanted_interface.empty())
    environment.push_back("LOCKSTEP_INTERFACE=" + node.interface);
  return environment;
}

/// Returns the GPUs that the ranks of a host may use; nullopt if neither an option nor a variable names them.
std::optional<std::vector<std::string>> usable_gpus(const cli::RunOptions& options, const Node& node,
                                                    const process::Environment& inherited) {
  const auto outer = process::find_variable(inherited, "CUDA_VISIBLE_DEVICES");
  std::vector<std::string> gpus;
  if (options.gpus.empty() && !outer && !options.isolate_gpus) return std::nullopt;
  if (options.gpus.empty() && !outer)
    for (int gpu = 0; gpu < node.info.gpus; ++gpu) gpus.push_back(std::to_string(gpu));
  // As in CUDA, the list ends at the first entry that is not a device.
  for (const std::string& gpu : base::split(!options.gpus.empty() ? options.gpus : outer.value_or(""), ',')) {
    if (gpu.empty() || gpu[0] == '-') break;
    gpus.push_back(gpu);
  }
  return gpus;
}

/// Sets CUDA_VISIBLE_DEVICES of the ranks. With --isolate-gpus, each rank gets only its own entry of the list.
/// Otherwise all ranks get the list of --gpus, or inherit their list, and each uses the entry of its local rank.
void assign_gpus(JobPlan& job, const cli::RunOptions& options, const Node& node,
                 const process::Environment& inherited) {
  const auto gpus = usable_gpus(options, node, inherited);
  if (!gpus || (gpus->empty() && !options.isolate_gpus)) return;
  const auto num_gpus = gpus->size(), num_ranks = job.ranks.size();
  if (num_gpus == 0 || (num_gpus < num_ranks && !options.share_gpus))
    throw base::UsageError("host " + base::quoted(node.name, 253) + " has " + std::to_string(num_gpus) +
                               " GPUs in its list for " + std::to_string(num_ranks) + " ranks",
                           num_gpus == 0 ? "remove --isolate-gpus on hosts without GPUs"
                                         : "use fewer ranks, list more GPUs (--gpus, CUDA_VISIBLE_DEVICES), or add "
                                           "--share-gpus");
  const std::string all = base::joined(*gpus, ",");
  for (std::size_t local = 0; local < num_ranks; ++local) {
    if (options.isolate_gpus)
      job.ranks[local].environment.push_back("CUDA_VISIBLE_DEVICES=" + (*gpus)[local % num_gpus]);
    else if (!options.gpus.empty())
      job.ranks[local].environment.push_back("CUDA_VISIBLE_DEVICES=" + all);
  }
}

/// With --share-gpus: what NCCL requires, from 2.30 on, of ranks that share a GPU. Older versions ignore it.
void allow_nccl_on_shared_gpus(JobPlan& job, const process::Environment& inherited) {
  for (const char* variable : {"NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_MAX_CTAS=1", "NCCL_NVLS_ENABLE=0"}) {
    const std::string_view text = variable;
    if (process::find_variable(inherited, text.substr(0, text.find('=')))) continue;
    for (RankPlan& rank : job.ranks) rank.environment.emplace_back(text);
  }
}

/// Returns Horovod's variables of one rank. CROSS counts the hosts that have a rank with this local rank.
process::Environment horovod_environment(int rank, int local_rank, std::size_t number, const std::vector<Node>& nodes) {
  const auto has_it = [&](const Node& node) { return node.ranks > local_rank; };
  const auto here = nodes.begin() + static_cast<std::ptrdiff_t>(number);
  return {"HOROVOD_RANK=" + std::to_string(rank),
          "HOROVOD_SIZE=" + std::to_string(count_ranks(nodes)),
          "HOROVOD_LOCAL_RANK=" + std::to_string(local_rank),
          "HOROVOD_LOCAL_SIZE=" + std::to_string(here->ranks),
          "HOROVOD_CROSS_RANK=" + std::to_string(std::count_if(nodes.begin(), here, has_it)),
          "HOROVOD_CROSS_SIZE=" + std::to_string(std::ranges::count_if(nodes, has_it)),
          "HOROVOD_HOSTNAME=" + here->info.host};
}

RankPlan plan_rank(int rank, int local_rank, const cli::RunOptions& options, const LaunchContext& context,
                   const Node& node, std::vector<int> cpus) {
  const std::string number = std::to_string(rank), local = std::to_string(local_rank);
  RankPlan plan;
  plan.rank = rank;
  plan.environment = {"LOCKSTEP_RANK=" + number, "LOCKSTEP_LOCAL_RANK=" + local, "RANK=" + number,
                      "LOCAL_RANK=" + local, "ROLE_RANK=" + number};
  std::vector<Cpu> own;
  for (const Cpu& cpu : node.info.cpus)
    if (std::ranges::find(cpus, cpu.id) != cpus.end()) own.push_back(cpu);
  // A quota grants time on all CPUs. Bound to some of them, ranks of several containers would meet on the same ones.
  const int usable = usable_cores(node.info);
  const bool has_quota = usable < num_cores(node.info.cpus);
  const int num_own = has_quota ? usable / node.ranks : num_cores(own);
  const auto threads = process::find_variable(context.environment, "OMP_NUM_THREADS");
  if (!threads || threads->empty()) {
    const bool shared = node.ranks > usable;
    plan.environment.push_back("OMP_NUM_THREADS=" + std::to_string(shared ? 1 : std::max(1, num_own)));
  }
  if (!options.local_rank_argument.empty()) plan.arguments = {"--" + options.local_rank_argument + "=" + local};
  if (options.bind == cli::Bind::kCores ||
      (options.bind == cli::Bind::kAuto && !has_quota && !(context.runs_python && num_own == 1)))
    plan.cpus = std::move(cpus);
  plan.reads_stdin =
      options.stdin_ranks == cli::StdinRanks::kAll || (options.stdin_ranks == cli::StdinRanks::kRankZero && rank == 0);
  return plan;
}

}  // namespace

int count_ranks(const std::vector<Node>& nodes) {
  return std::accumulate(nodes.begin(), nodes.end(), 0, [](int sum, const Node& node) { return sum + node.ranks; });
}

process::Environment inherited_environment(const Node& node, const LaunchContext& context) {
  process::Environment inherited;
  for (const std::string& variable : context.environment) {
    const std::string_view name = process::variable_name(variable);
    const bool own_gpus = name == "CUDA_VISIBLE_DEVICES" && node.is_slurm && !node.info.visible_gpus.empty() &&
                          !is_one_of(name, context.exported);
    if (node.is_local || is_one_of(name, context.exported) || (is_forwarded(name) && !own_gpus))
      inherited.push_back(variable);
  }
  if (!node.is_local && !node.info.visible_gpus.empty() && !process::find_variable(inherited, "CUDA_VISIBLE_DEVICES"))
    inherited.push_back("CUDA_VISIBLE_DEVICES=" + node.info.visible_gpus);
  return inherited;
}

bool is_forwarded(std::string_view name) {
  constexpr std::array kPrefixes = {"LOCKSTEP_", "OMP_",     "GOMP_",  "KMP_",  "MKL_", "OPENBLAS_",
                                    "TORCH_",    "PYTORCH_", "NCCL_",  "GLOO_", "UCX_", "CUDA_",
                                    "CUBLAS_",   "PYTHON",   "CONDA_", "HF_",   "LC_"};
  constexpr std::array kNames = {"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "TZ", "TMPDIR"};
  constexpr std::array kSecrets = {"TOKEN", "SECRET", "PASSW", "_KEY", "CREDENTIAL"};
  const bool secret =
      std::ranges::any_of(kSecrets, [&](const char* word) { return name.find(word) != std::string_view::npos; });
  return (begins_with_one_of(name, kPrefixes) || is_one_of(name, kNames)) && (!secret || name == "LOCKSTEP_KEY_FILE");
}

process::Environment apply_exports(process::Environment environment, const std::vector<std::string>& exports) {
  const auto has_value = [](const std::string& variable) { return variable.find('=') != std::string::npos; };
  for (const std::string& variable : exports)
    if (!has_value(variable) && !process::find_variable(environment, variable))
      throw base::UsageError("-x " + base::quoted(variable, 80) +
                             ": this variable is not set; expected a variable that is set, or NAME=VALUE");
  for (const std::string& variable : exports) {
    if (!has_value(variable)) continue;
    environment = process::remove_variables(std::move(environment), {variable});
    environment.push_back(variable);
  }
  return environment;
}

JobLabel job_label(const LaunchContext& context, int world_size) {
  return {context.job, context.name, context.launcher_host, context.launcher_pid, world_size};
}

std::vector<JobPlan> plan_jobs(const cli::RunOptions& options, const LaunchContext& context,
                               const std::vector<Node>& nodes) {
  const process::Environment for_all = shared_environment(options, context, nodes);
  const auto num_ranks = static_cast<std::size_t>(count_ranks(nodes));
  std::vector<JobPlan> jobs;
  int first = 0;
  for (std::size_t number = 0; number < nodes.size(); first += nodes[number++].ranks) {
    const Node& node = nodes[number];
    JobPlan job{
        .program = context.program,
        .arguments = options.command,
        .directory = context.directory.empty() && !node.is_local ? context.launcher_directory : context.directory,
        .extends_own_environment = !node.is_local,
        .fail_grace = options.fail_grace,
        .measures_activity = options.idle_timeout.count() > 0,
        .run_dir = context.run_dir,
        .output_window = output_window(num_ranks),
        .key = node.reads_key ? job::JobKey() : context.key,
        .label = job_label(context, static_cast<int>(num_ranks))};
    std::vector<std::vector<int>> cpus = split_cpus(node.info.cpus, node.ranks);
    for (int local = 0; local < node.ranks; ++local) {
      RankPlan rank =
          plan_rank(first + local, local, options, context, node, std::move(cpus[static_cast<std::size_t>(local)]));
      for (std::string& variable : horovod_environment(first + local, local, number, nodes))
        rank.environment.push_back(std::move(variable));
      job.ranks.push_back(std::move(rank));
    }
    process::Environment inherited = inherited_environment(node, context);
    assign_gpus(job, options, node, inherited);
    if (options.share_gpus) allow_nccl_on_shared_gpus(job, inherited);
    process::Environment ours = node_environment(number, node, options, inherited);
    ours.insert(ours.end(), for_all.begin(), for_all.end());
    inherited = process::merge_environment(inherited, ours);
    job.environment = process::remove_variables(std::move(inherited), job.ranks.front().environment);
    jobs.push_back(std::move(job));
  }
  return jobs;
}

job::health::HealthLimits health_limits(const cli::RunOptions& options, const process::Environment& environment) {
  job::health::HealthLimits limits;
  limits.hang = options.hang_timeout.value_or(env_of(environment).lockstep_timeout.value_or(limits.hang));
  limits.judge_last_rank = options.hang_timeout.has_value();  // an explicit limit applies to the last rank too
  limits.work = options.work_timeout.value_or(limits.hang.count() == 0 ? limits.hang : limits.work);
  limits.judge_last_work = options.work_timeout.has_value();
  limits.idle = options.idle_timeout;
  limits.stall = options.stall_timeout.value_or(limits.hang.count() == 0 ? limits.hang : limits.stall);
  return limits;
}

std::vector<std::string> check_variables(const process::Environment& environment) {
  const base::Env env = env_of(environment);
  env.check();
  if (env.lockstep_inject) job::parse_injection("LOCKSTEP_INJECT", *env.lockstep_inject);
  const std::vector<std::string>& known = env.lockstep_names();
  std::vector<std::string> warnings;
  for (const std::string& variable : environment) {
    const std::string name(process::variable_name(variable));
    const bool is_ours = name.starts_with("LOCKSTEP_") && !name.starts_with("LOCKSTEP_TEST_");
    if (is_ours && std::ranges::find(known, name) == known.end())
      warnings.push_back("the variable " + base::quoted(name, 80) + " does not exist" + cli::suggestion(name, known));
  }
  return warnings;
}

int default_ranks(const cli::RunOptions& options, const LaunchContext& context, const Node& node) {
  const auto named = usable_gpus(options, node, inherited_environment(node, context));
  int gpus = node.info.gpus;
  if (named && (gpus > 0 || !options.gpus.empty()))
    gpus =
        options.gpus.empty() ? std::min<int>(gpus, static_cast<int>(named->size())) : static_cast<int>(named->size());
  const bool hidden = named && named->empty() && node.info.gpus > 0;  // CUDA_VISIBLE_DEVICES is empty
  return std::max(1, gpus > 0 || hidden ? gpus : usable_cores(node.info));
}

std::vector<int> fill_slots(const std::vector<int>& slots, int ranks) {
  const int all = std::accumulate(slots.begin(), slots.end(), 0);
  if (ranks > all)
    throw base::UsageError("-n is " + std::to_string(ranks) + ", but the hosts have " + std::to_string(all) +
                           " slots; expected an integer from 1 to " + std::to_string(all));
  int left = ranks == 0 ? all : ranks;
  std::vector<int> filled;
  for (const int slot : slots) {
    filled.push_back(std::min(slot, left));
    left -= filled.back();
  }
  return filled;
}

std::size_t output_window(std::size_t num_ranks) {
  constexpr std::size_t kMin = std::size_t{8} << 10, kMax = std::size_t{256} << 10, kAll = std::size_t{32} << 20;
  return std::clamp(kAll / (2 * std::max<std::size_t>(num_ranks, 1)), kMin, kMax);
}

std::string rank_prefix(int rank, std::string_view host) {
  return "[" + std::string(host) + (host.empty() ? "" : ":") + std::to_string(rank) + "] ";
}

}  // namespace lockstep::launcher::plan
