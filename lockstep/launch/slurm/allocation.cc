#include "lockstep/launch/slurm/allocation.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/identity/node_list.h"

namespace lockstep::launcher::slurm {
namespace {

constexpr std::int64_t kFirstSpecialStep = 0xfffffff0;  // this and higher ids: batch script, interactive shell

bool is_in_step(const base::Env& env) {
  const auto step = base::parse_int(env.slurm_step_id.value_or(""));
  return env.slurm_procid && step && *step < kFirstSpecialStep;
}

std::vector<cli::HostSpec> allocated_hosts(const base::Env& env) {
  const std::vector<std::string> names = job::identity::expand_hosts("SLURM_JOB_NODELIST", *env.slurm_job_nodelist);
  const bool asked = env.slurm_ntasks || env.slurm_ntasks_per_node;
  std::vector<int> counts = asked && env.slurm_tasks_per_node
                                ? job::identity::expand_counts("SLURM_TASKS_PER_NODE", *env.slurm_tasks_per_node)
                                : std::vector<int>();
  if (is_in_step(env)) counts.clear();  // in a step the variable describes the step
  if (!counts.empty() && counts.size() != names.size())
    throw base::UsageError("SLURM_TASKS_PER_NODE: " + base::quoted(*env.slurm_tasks_per_node, 80) + " has counts for " +
                           std::to_string(counts.size()) + " hosts; expected the " + std::to_string(names.size()) +
                           " hosts of SLURM_JOB_NODELIST");
  std::vector<cli::HostSpec> hosts;
  for (std::size_t i = 0; i < names.size(); ++i)
    hosts.push_back({.name = names[i],
                     .slots = counts.empty() ? 0 : counts[i],
                     .is_slurm = true,
                     .is_local = env.slurmd_nodename == names[i]});
  return hosts;
}

}  // namespace

std::vector<cli::HostSpec> resolve_hosts(std::vector<cli::HostSpec> named, const std::string& env_from,
                                         const base::Env& env) {
  const bool allocated = env.slurm_job_id && env.slurm_job_nodelist;
  if (env_from == "slurm" && !allocated)
    throw base::UsageError("--env-from is \"slurm\", but SLURM_JOB_ID and SLURM_JOB_NODELIST are not set",
                           "create an allocation with salloc or sbatch");
  if (env_from == "none") return named;
  if (!allocated) {
    const bool starts_others = named.empty() && env.ompi_default_hostfile && !env.ompi_comm_world_size;
    return starts_others ? cli::read_host_file("OMPI_MCA_orte_default_hostfile", *env.ompi_default_hostfile) : named;
  }
  if (named.empty() && base::parse_int(env.slurm_het_size.value_or("")).value_or(1) > 1)
    throw base::UsageError(
        "this SLURM job has " + *env.slurm_het_size + " components (SLURM_HET_SIZE); expected a job of one component",
        "request all hosts in one component, or name the hosts with -H");
  if (named.empty() && is_in_step(env) && base::parse_int(env.slurm_ntasks.value_or("")).value_or(1) > 1)
    throw base::UsageError("srun has started lockstep run " + *env.slurm_ntasks +
                               " times; expected once: it starts the ranks of all hosts itself",
                           "call it once, without srun, or let srun start the program: srun ./train");
  const std::vector<cli::HostSpec> given = allocated_hosts(env);
  if (named.empty()) return given;
  for (cli::HostSpec& host : named) {
    const auto found = std::ranges::find(given, host.name, &cli::HostSpec::name);
    if (found == given.end() || !host.user.empty() || host.port != 0) continue;
    host.is_slurm = true;
    host.is_local = found->is_local;
  }
  return named;
}

}  // namespace lockstep::launcher::slurm
