#include "lockstep/base/env.h"

#include <cstdlib>

namespace lockstep::base {

Env Env::from(const std::function<Value(const char*)>& lookup) {
  const auto get = [&](const char* name) -> Value {
    Value value = lookup(name);
    return value && !value->empty() ? value : std::nullopt;
  };
  Env env;
  env.lockstep_rank = get("LOCKSTEP_RANK");
  env.lockstep_world_size = get("LOCKSTEP_WORLD_SIZE");
  env.lockstep_local_rank = get("LOCKSTEP_LOCAL_RANK");
  env.lockstep_local_world_size = get("LOCKSTEP_LOCAL_WORLD_SIZE");
  env.lockstep_node_rank = get("LOCKSTEP_NODE_RANK");
  env.lockstep_num_nodes = get("LOCKSTEP_NUM_NODES");
  env.lockstep_store = get("LOCKSTEP_STORE");
  env.lockstep_job = get("LOCKSTEP_JOB");
  env.lockstep_page = get("LOCKSTEP_PAGE");
  env.lockstep_terminal = get("LOCKSTEP_TERMINAL");
  env.lockstep_env_from = get("LOCKSTEP_ENV_FROM");
  env.lockstep_transport = get("LOCKSTEP_TRANSPORT");
  env.lockstep_timeout = get("LOCKSTEP_TIMEOUT");
  env.lockstep_arena = get("LOCKSTEP_ARENA");
  env.tmpdir = get("TMPDIR");
  env.lockstep_join_timeout = get("LOCKSTEP_JOIN_TIMEOUT");
  env.lockstep_interface = get("LOCKSTEP_INTERFACE");
  env.lockstep_host_id = get("LOCKSTEP_HOST_ID");
  env.lockstep_outer = get("LOCKSTEP_OUTER");
  env.lockstep_key_file = get("LOCKSTEP_KEY_FILE");
  env.lockstep_inject = get("LOCKSTEP_INJECT");
  env.lockstep_log = get("LOCKSTEP_LOG");
  env.lockstep_program = get("LOCKSTEP_PROGRAM");
  env.omp_num_threads = get("OMP_NUM_THREADS");
  env.cuda_visible_devices = get("CUDA_VISIBLE_DEVICES");
  env.path = get("PATH");
  env.ssh_connection = get("SSH_CONNECTION");
  env.columns = get("COLUMNS");
  env.term = get("TERM");
  env.rank = get("RANK");
  env.world_size = get("WORLD_SIZE");
  env.local_rank = get("LOCAL_RANK");
  env.local_world_size = get("LOCAL_WORLD_SIZE");
  env.group_rank = get("GROUP_RANK");
  env.group_world_size = get("GROUP_WORLD_SIZE");
  env.master_addr = get("MASTER_ADDR");
  env.master_port = get("MASTER_PORT");
  env.torchelastic_run_id = get("TORCHELASTIC_RUN_ID");
  env.torchelastic_restart_count = get("TORCHELASTIC_RESTART_COUNT");
  env.torchelastic_use_agent_store = get("TORCHELASTIC_USE_AGENT_STORE");
  env.ompi_comm_world_rank = get("OMPI_COMM_WORLD_RANK");
  env.ompi_comm_world_size = get("OMPI_COMM_WORLD_SIZE");
  env.ompi_comm_world_local_rank = get("OMPI_COMM_WORLD_LOCAL_RANK");
  env.ompi_comm_world_local_size = get("OMPI_COMM_WORLD_LOCAL_SIZE");
  env.pmix_namespace = get("PMIX_NAMESPACE");
  env.pmix_rank = get("PMIX_RANK");
  env.pmi_rank = get("PMI_RANK");
  env.pmi_size = get("PMI_SIZE");
  env.pmi_jobid = get("PMI_JOBID");
  env.pmi_fd = get("PMI_FD");
  env.mpi_localrankid = get("MPI_LOCALRANKID");
  env.mpi_localnranks = get("MPI_LOCALNRANKS");
  env.slurm_job_id = get("SLURM_JOB_ID");
  env.slurm_job_nodelist = get("SLURM_JOB_NODELIST");
  env.slurmd_nodename = get("SLURMD_NODENAME");
  env.slurm_tasks_per_node = get("SLURM_TASKS_PER_NODE");
  env.slurm_ntasks_per_node = get("SLURM_NTASKS_PER_NODE");
  env.slurm_restart_count = get("SLURM_RESTART_COUNT");
  env.slurm_step_id = get("SLURM_STEP_ID");
  env.slurm_procid = get("SLURM_PROCID");
  env.slurm_ntasks = get("SLURM_NTASKS");
  env.slurm_localid = get("SLURM_LOCALID");
  env.slurm_nodeid = get("SLURM_NODEID");
  env.slurm_step_num_nodes = get("SLURM_STEP_NUM_NODES");
  env.slurm_step_nodelist = get("SLURM_STEP_NODELIST");
  env.slurm_step_tasks_per_node = get("SLURM_STEP_TASKS_PER_NODE");
  return env;
}

const Env& Env::process() {
  static const Env env = from([](const char* name) -> Value {
    const char* value = std::getenv(name);
    return value ? Value(value) : std::nullopt;
  });
  return env;
}

}  // namespace lockstep::base
