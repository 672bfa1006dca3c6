#include "lockstep/launch/plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <set>

#include "lockstep/base/parse.h"

namespace lockstep::launcher {
namespace {

constexpr std::chrono::seconds kLauncherIsFirst{10};

std::string_view name_of(std::string_view variable) { return variable.substr(0, variable.find('=')); }

std::optional<std::string_view> value_of(const Environment& environment, std::string_view name) {
  for (const std::string& variable : environment)
    if (name_of(variable) == name && variable.size() > name.size()) return std::string_view(variable).substr(name.size() + 1);
  return std::nullopt;
}

/// What an outer launcher says about the process it started; wrong for ours.
bool belongs_to_another_launcher(std::string_view name) {
  constexpr std::array kPrefixes = {"TORCHELASTIC_", "ROLE_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_"};
  constexpr std::array kNames = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "LOCKSTEP_TERMINAL", "LOCKSTEP_PAGE"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(), [&](const char* prefix) { return name.rfind(prefix, 0) == 0; }) ||
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

Environment inherited(const Environment& environment, const Environment& ours, const Environment& ours_per_rank) {
  std::set<std::string_view> replaced;
  for (const Environment* set : {&ours, &ours_per_rank})
    for (const std::string& variable : *set) replaced.insert(name_of(variable));
  Environment kept;
  for (const std::string& variable : environment)
    if (!replaced.contains(name_of(variable)) && !belongs_to_another_launcher(name_of(variable))) kept.push_back(variable);
  return kept;
}

/// As the variable takes it: later than `limit`, unless there is none.
std::string seconds(std::chrono::milliseconds limit, std::chrono::milliseconds later) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g", limit.count() == 0 ? 0 : static_cast<double>((limit + later).count()) / 1000);
  return text;
}

Environment for_all_ranks(const RunOptions& options, const Surroundings& surroundings) {
  const std::string size = std::to_string(options.ranks);
  Environment environment = {
      "LOCKSTEP_WORLD_SIZE=" + size,
      "LOCKSTEP_LOCAL_WORLD_SIZE=" + size,
      "LOCKSTEP_NODE_RANK=0",
      "LOCKSTEP_NUM_NODES=1",
      "LOCKSTEP_STORE=" + surroundings.store,
      "LOCKSTEP_JOB=" + surroundings.job,
      "WORLD_SIZE=" + size,
      "LOCAL_WORLD_SIZE=" + size,
      "GROUP_RANK=0",
      "GROUP_WORLD_SIZE=1",
      "NODE_RANK=0",
      "MASTER_ADDR=127.0.0.1",
      "MASTER_PORT=" + std::to_string(surroundings.master_port),
  };
  if (!options.transport.empty()) environment.push_back("LOCKSTEP_TRANSPORT=" + options.transport);
  if (!options.inject.empty()) environment.push_back("LOCKSTEP_INJECT=" + options.inject);
  if (!options.join_timeout.empty()) environment.push_back("LOCKSTEP_JOIN_TIMEOUT=" + options.join_timeout);
  // The launcher, which sees all ranks, comes first; a wait ends by itself when the launcher does not.
  if (options.hang_timeout || !value_of(surroundings.environment, "LOCKSTEP_TIMEOUT"))
    environment.push_back("LOCKSTEP_TIMEOUT=" + seconds(pulse_limits(options, {}).hang, kLauncherIsFirst));
  // A rank's line has less room than the terminal: its prefix stands in front.
  const int room = surroundings.columns - static_cast<int>(prefix_of(options.ranks - 1).size());
  if (room > 0) environment.push_back("LOCKSTEP_TERMINAL=" + std::to_string(room));
  // Python keeps lines back when it writes to a pipe.
  if (!value_of(surroundings.environment, "PYTHONUNBUFFERED")) environment.push_back("PYTHONUNBUFFERED=1");
  return environment;
}

RankPlan plan_rank(int rank, const RunOptions& options, const Surroundings& surroundings, std::vector<int> cpus) {
  const std::string number = std::to_string(rank);
  RankPlan plan;
  plan.rank = rank;
  plan.environment = {"LOCKSTEP_RANK=" + number, "LOCKSTEP_LOCAL_RANK=" + number, "RANK=" + number, "LOCAL_RANK=" + number};
  const auto threads = value_of(surroundings.environment, "OMP_NUM_THREADS");
  if (!threads || threads->empty()) {
    std::vector<Cpu> own;
    for (const Cpu& cpu : surroundings.cpus)
      if (std::find(cpus.begin(), cpus.end(), cpu.id) != cpus.end()) own.push_back(cpu);
    const bool shared = options.ranks > num_cores(surroundings.cpus);
    plan.environment.push_back("OMP_NUM_THREADS=" + std::to_string(shared ? 1 : std::max(1, num_cores(own))));
  }
  if (!options.local_rank_argument.empty()) plan.arguments = {"--" + options.local_rank_argument + "=" + number};
  if (options.bind) plan.cpus = std::move(cpus);
  return plan;
}

}  // namespace

JobPlan plan_job(const RunOptions& options, const Surroundings& surroundings) {
  JobPlan job;
  job.program = surroundings.program;
  job.arguments = options.command;
  job.fail_grace = options.fail_grace;
  job.run_dir = surroundings.run_dir;
  job.key = surroundings.key;
  std::vector<std::vector<int>> cpus = split_cpus(surroundings.cpus, options.ranks);
  for (int rank = 0; rank < options.ranks; ++rank)
    job.ranks.push_back(plan_rank(rank, options, surroundings, std::move(cpus[static_cast<std::size_t>(rank)])));
  const Environment ours = for_all_ranks(options, surroundings);
  job.environment = inherited(surroundings.environment, ours, job.ranks.front().environment);
  job.environment.insert(job.environment.end(), ours.begin(), ours.end());
  return job;
}

job::PulseLimits pulse_limits(const RunOptions& options, const Environment& environment) {
  job::PulseLimits limits;
  const auto variable = value_of(environment, "LOCKSTEP_TIMEOUT");
  const auto seconds = variable ? base::parse_double(*variable) : std::nullopt;
  if (seconds && *seconds >= 0 && *seconds < 1e7) limits.hang = std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
  limits.hang = options.hang_timeout.value_or(limits.hang);
  limits.also_alone = options.hang_timeout.has_value();  // whoever asks for a limit means each rank
  limits.stall = options.stall_timeout.value_or(limits.hang.count() == 0 ? limits.hang : limits.stall);
  return limits;
}

int default_ranks(const Environment& environment, int gpus, int cores) {
  if (const auto visible = value_of(environment, "CUDA_VISIBLE_DEVICES"); visible && gpus > 0) {
    // CUDA's rule: the list ends at the first entry that is no device.
    int allowed = 0;
    for (const std::string& device : base::split(*visible, ',')) {
      if (device.empty() || device[0] == '-') break;
      ++allowed;
    }
    gpus = std::min(gpus, allowed);
  }
  return std::max(1, gpus > 0 ? gpus : cores);
}

std::string prefix_of(int rank) { return "[" + std::to_string(rank) + "] "; }

}  // namespace lockstep::launcher
