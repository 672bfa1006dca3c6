#include "lockstep/base/env.h"

#include <cstdlib>

namespace lockstep::base {
namespace {

struct Variable {
  Env::Value Env::* field;
  const char* name;
};

constexpr Variable kLockstepVariables[] = {
    {&Env::lockstep_rank, "LOCKSTEP_RANK"},
    {&Env::lockstep_world_size, "LOCKSTEP_WORLD_SIZE"},
    {&Env::lockstep_local_rank, "LOCKSTEP_LOCAL_RANK"},
    {&Env::lockstep_local_world_size, "LOCKSTEP_LOCAL_WORLD_SIZE"},
    {&Env::lockstep_node_rank, "LOCKSTEP_NODE_RANK"},
    {&Env::lockstep_num_nodes, "LOCKSTEP_NUM_NODES"},
    {&Env::lockstep_store, "LOCKSTEP_STORE"},
    {&Env::lockstep_job, "LOCKSTEP_JOB"},
    {&Env::lockstep_generation, "LOCKSTEP_GENERATION"},
    {&Env::lockstep_page, "LOCKSTEP_PAGE"},
    {&Env::lockstep_terminal, "LOCKSTEP_TERMINAL"},
    {&Env::lockstep_env_from, "LOCKSTEP_ENV_FROM"},
    {&Env::lockstep_transport, "LOCKSTEP_TRANSPORT"},
    {&Env::lockstep_device, "LOCKSTEP_DEVICE"},
    {&Env::lockstep_timeout, "LOCKSTEP_TIMEOUT"},
    {&Env::lockstep_host_timeout, "LOCKSTEP_HOST_TIMEOUT"},
    {&Env::lockstep_arena, "LOCKSTEP_ARENA"},
    {&Env::lockstep_join_timeout, "LOCKSTEP_JOIN_TIMEOUT"},
    {&Env::lockstep_interface, "LOCKSTEP_INTERFACE"},
    {&Env::lockstep_host_id, "LOCKSTEP_HOST_ID"},
    {&Env::lockstep_cross_host_transport, "LOCKSTEP_CROSS_HOST_TRANSPORT"},
    {&Env::lockstep_key_file, "LOCKSTEP_KEY_FILE"},
    {&Env::lockstep_name, "LOCKSTEP_NAME"},
    {&Env::lockstep_trace, "LOCKSTEP_TRACE"},
    {&Env::lockstep_inject, "LOCKSTEP_INJECT"},
    {&Env::lockstep_instruction_set, "LOCKSTEP_INSTRUCTION_SET"},
    {&Env::lockstep_log, "LOCKSTEP_LOG"},
    {&Env::lockstep_program, "LOCKSTEP_PROGRAM"},
    {&Env::lockstep_watch, "LOCKSTEP_WATCH"},
    {&Env::lockstep_error_hints, "LOCKSTEP_ERROR_HINTS"},
    {&Env::cuda_visible_devices, "CUDA_VISIBLE_DEVICES"},
    {&Env::nccl_socket_ifname, "NCCL_SOCKET_IFNAME"},
    {&Env::nccl_multi_rank_gpu_enable, "NCCL_MULTI_RANK_GPU_ENABLE"},
    {&Env::path, "PATH"},
    {&Env::columns, "COLUMNS"},
    {&Env::term, "TERM"},
};

constexpr Variable kLauncherVariables[] = {
    {&Env::rank, "RANK"},
    {&Env::world_size, "WORLD_SIZE"},
    {&Env::local_rank, "LOCAL_RANK"},
    {&Env::local_world_size, "LOCAL_WORLD_SIZE"},
    {&Env::group_rank, "GROUP_RANK"},
    {&Env::group_world_size, "GROUP_WORLD_SIZE"},
    {&Env::master_addr, "MASTER_ADDR"},
    {&Env::master_port, "MASTER_PORT"},
    {&Env::torchelastic_run_id, "TORCHELASTIC_RUN_ID"},
    {&Env::torchelastic_restart_count, "TORCHELASTIC_RESTART_COUNT"},
    {&Env::torchelastic_use_agent_store, "TORCHELASTIC_USE_AGENT_STORE"},
    {&Env::ompi_comm_world_rank, "OMPI_COMM_WORLD_RANK"},
    {&Env::ompi_comm_world_size, "OMPI_COMM_WORLD_SIZE"},
    {&Env::ompi_comm_world_local_rank, "OMPI_COMM_WORLD_LOCAL_RANK"},
    {&Env::ompi_comm_world_local_size, "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {&Env::pmix_namespace, "PMIX_NAMESPACE"},
    {&Env::pmix_rank, "PMIX_RANK"},
    {&Env::pmi_rank, "PMI_RANK"},
    {&Env::pmi_size, "PMI_SIZE"},
    {&Env::pmi_jobid, "PMI_JOBID"},
    {&Env::pmi_fd, "PMI_FD"},
    {&Env::mpi_localrankid, "MPI_LOCALRANKID"},
    {&Env::mpi_localnranks, "MPI_LOCALNRANKS"},
    {&Env::slurm_job_id, "SLURM_JOB_ID"},
    {&Env::slurm_job_nodelist, "SLURM_JOB_NODELIST"},
    {&Env::slurmd_nodename, "SLURMD_NODENAME"},
    {&Env::slurm_tasks_per_node, "SLURM_TASKS_PER_NODE"},
    {&Env::slurm_ntasks_per_node, "SLURM_NTASKS_PER_NODE"},
    {&Env::slurm_het_size, "SLURM_HET_SIZE"},
    {&Env::slurm_restart_count, "SLURM_RESTART_COUNT"},
    {&Env::slurm_step_id, "SLURM_STEP_ID"},
    {&Env::slurm_procid, "SLURM_PROCID"},
    {&Env::slurm_ntasks, "SLURM_NTASKS"},
    {&Env::slurm_localid, "SLURM_LOCALID"},
    {&Env::slurm_nodeid, "SLURM_NODEID"},
    {&Env::slurm_step_num_nodes, "SLURM_STEP_NUM_NODES"},
    {&Env::slurm_step_nodelist, "SLURM_STEP_NODELIST"},
    {&Env::slurm_step_tasks_per_node, "SLURM_STEP_TASKS_PER_NODE"},
};

}  // namespace

Env Env::from(const std::function<Value(const char*)>& lookup) {
  Env env;
  const auto read = [&](const auto& variables) {
    for (const Variable& variable : variables)
      if (Value value = lookup(variable.name); value && !value->empty()) env.*variable.field = std::move(value);
  };
  read(kLockstepVariables);
  read(kLauncherVariables);
  return env;
}

std::vector<std::string> Env::lockstep_names() {
  std::vector<std::string> names;
  for (const Variable& variable : kLockstepVariables)
    if (std::string_view(variable.name).starts_with("LOCKSTEP_")) names.emplace_back(variable.name);
  return names;
}

const Env& Env::this_process() {
  static const Env env = from([](const char* name) -> Value {
    const char* value = std::getenv(name);
    return value ? Value(value) : std::nullopt;
  });
  return env;
}

}  // namespace lockstep::base
