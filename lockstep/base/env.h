// The environment variables that Lockstep reads. Only env.cc calls getenv().
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::base {

/// Every environment variable that Lockstep reads, as text; nullopt if it is not set. An empty value counts as not set.
struct Env {
  using Value = std::optional<std::string>;

  // Set by `lockstep run` for its ranks.
  Value lockstep_rank;              ///< LOCKSTEP_RANK: index of this rank, from 0
  Value lockstep_world_size;        ///< LOCKSTEP_WORLD_SIZE: number of ranks
  Value lockstep_local_rank;        ///< LOCKSTEP_LOCAL_RANK: index of this rank on its host
  Value lockstep_local_world_size;  ///< LOCKSTEP_LOCAL_WORLD_SIZE: number of ranks on this host
  Value lockstep_node_rank;         ///< LOCKSTEP_NODE_RANK: index of this host
  Value lockstep_num_nodes;         ///< LOCKSTEP_NUM_NODES: number of hosts
  Value lockstep_store;             ///< LOCKSTEP_STORE: host:port of the launcher's store
  Value lockstep_job;               ///< LOCKSTEP_JOB: identifies the job to its store
  Value lockstep_generation;        ///< LOCKSTEP_GENERATION: how many times the launcher has started this job before
  Value lockstep_page;      ///< LOCKSTEP_PAGE: descriptor of the shared memory with this rank's page (rank_page.h)
  Value lockstep_terminal;  ///< LOCKSTEP_TERMINAL: columns that a rank's line may use; set only if the launcher
                            ///< writes to a terminal

  // Set by a user.
  Value lockstep_env_from;   ///< LOCKSTEP_ENV_FROM: source of the rank's identity: auto (default), none, lockstep,
                             ///< torchrun, mpi, slurm or pmi
  Value lockstep_transport;  ///< LOCKSTEP_TRANSPORT: auto, self, shm, hierarchy, tcp, mpi or nccl
  Value lockstep_device;   ///< LOCKSTEP_DEVICE: auto, cpu, cuda or cuda:N; by default a rank uses a GPU if it sees one
  Value lockstep_arena;    ///< LOCKSTEP_ARENA: on or off; on by default if ranks share a host
  Value lockstep_timeout;  ///< LOCKSTEP_TIMEOUT: seconds that a rank waits for ranks that make no progress; default
                           ///< 300; with 0 it waits forever
  Value lockstep_host_timeout;  ///< LOCKSTEP_HOST_TIMEOUT: seconds that another host may send no packet; default 5
  Value lockstep_join_timeout;  ///< LOCKSTEP_JOIN_TIMEOUT: seconds that init() waits for all ranks; default 60
  Value lockstep_interface;     ///< LOCKSTEP_INTERFACE: network interface for traffic between ranks
  Value lockstep_host_id;       ///< LOCKSTEP_HOST_ID: name of this host; ranks with different names share no memory
  Value lockstep_cross_host_transport;  ///< LOCKSTEP_CROSS_HOST_TRANSPORT: transport between hosts: auto, tcp or mpi
  Value lockstep_key_file;  ///< LOCKSTEP_KEY_FILE: file with the job's key, for jobs not started by `lockstep run`
  Value lockstep_inject;    ///< LOCKSTEP_INJECT: a fault to inject, in the syntax of `lockstep run --inject`
  Value lockstep_name;   ///< LOCKSTEP_NAME: name of this run, as `lockstep run --name`; a Trainer writes to runs/NAME
  Value lockstep_trace;  ///< LOCKSTEP_TRACE: if 1, a Trainer writes a trace of its steps, as `lockstep run --trace`
  Value lockstep_instruction_set;  ///< LOCKSTEP_INSTRUCTION_SET: instruction set of vector loops: baseline, avx2 or
                                   ///< avx512; default: the widest that the CPU supports
  Value lockstep_log;              ///< LOCKSTEP_LOG: quiet or info (default)
  Value lockstep_program;          ///< LOCKSTEP_PROGRAM: path of the program `lockstep`, for launch()
  Value lockstep_watch;            ///< LOCKSTEP_WATCH: "off" to leave Python programs with torch.distributed unwatched
  Value lockstep_error_hints;      ///< LOCKSTEP_ERROR_HINTS: a file with the user's rows for the table of error texts
  Value cuda_visible_devices;      ///< CUDA_VISIBLE_DEVICES: GPUs that this process may use
  Value nccl_socket_ifname;        ///< NCCL_SOCKET_IFNAME: interface that NCCL uses; errors of NCCL mention it
  Value nccl_multi_rank_gpu_enable;  ///< NCCL_MULTI_RANK_GPU_ENABLE: 1 if NCCL may serve several ranks on one GPU
  Value path;                        ///< PATH: directories in which programs are looked up
  Value columns;                     ///< COLUMNS: width of the terminal
  Value term;                        ///< TERM: "dumb" disables redrawing

  // Set by torchrun, and by scripts that use env://.
  Value rank;                          ///< RANK
  Value world_size;                    ///< WORLD_SIZE
  Value local_rank;                    ///< LOCAL_RANK
  Value local_world_size;              ///< LOCAL_WORLD_SIZE
  Value group_rank;                    ///< GROUP_RANK: index of this host
  Value group_world_size;              ///< GROUP_WORLD_SIZE: number of hosts
  Value master_addr;                   ///< MASTER_ADDR
  Value master_port;                   ///< MASTER_PORT
  Value torchelastic_run_id;           ///< TORCHELASTIC_RUN_ID: set by torchrun only
  Value torchelastic_restart_count;    ///< TORCHELASTIC_RESTART_COUNT
  Value torchelastic_use_agent_store;  ///< TORCHELASTIC_USE_AGENT_STORE: True when torchrun holds MASTER_PORT

  // Set by mpirun (Open MPI) and by other launchers that implement PMI.
  Value ompi_comm_world_rank;        ///< OMPI_COMM_WORLD_RANK
  Value ompi_comm_world_size;        ///< OMPI_COMM_WORLD_SIZE
  Value ompi_comm_world_local_rank;  ///< OMPI_COMM_WORLD_LOCAL_RANK
  Value ompi_comm_world_local_size;  ///< OMPI_COMM_WORLD_LOCAL_SIZE
  Value pmix_namespace;              ///< PMIX_NAMESPACE: the launcher's name of the job
  Value pmix_rank;                   ///< PMIX_RANK
  Value pmi_rank;                    ///< PMI_RANK
  Value pmi_size;                    ///< PMI_SIZE
  Value pmi_jobid;                   ///< PMI_JOBID
  Value pmi_fd;                      ///< PMI_FD: descriptor of the connection to the launcher
  Value mpi_localrankid;  ///< MPI_LOCALRANKID: index of this rank on its host; set by Hydra, the mpiexec of MPICH and
                          ///< Intel MPI
  Value mpi_localnranks;  ///< MPI_LOCALNRANKS: number of ranks on this host; also set by Hydra

  // Set by SLURM, in an allocation and in the tasks of a step.
  Value slurm_job_id;               ///< SLURM_JOB_ID
  Value slurm_job_nodelist;         ///< SLURM_JOB_NODELIST: the hosts of the allocation, in SLURM's short form
  Value slurmd_nodename;            ///< SLURMD_NODENAME: SLURM's name for this host, set on the hosts of an allocation
  Value slurm_tasks_per_node;       ///< SLURM_TASKS_PER_NODE: tasks on each of these hosts, such as 2(x2),1
  Value slurm_ntasks_per_node;      ///< SLURM_NTASKS_PER_NODE: tasks per host that the user requested
  Value slurm_het_size;             ///< SLURM_HET_SIZE: components of a heterogeneous job
  Value slurm_restart_count;        ///< SLURM_RESTART_COUNT: how many times the job was requeued
  Value slurm_step_id;              ///< SLURM_STEP_ID: set by srun; not set in a batch script
  Value slurm_procid;               ///< SLURM_PROCID: index of this task; also set in a batch script
  Value slurm_ntasks;               ///< SLURM_NTASKS: number of tasks
  Value slurm_localid;              ///< SLURM_LOCALID: index of this task on its host
  Value slurm_nodeid;               ///< SLURM_NODEID: index of this host
  Value slurm_step_num_nodes;       ///< SLURM_STEP_NUM_NODES: number of hosts of the step
  Value slurm_step_nodelist;        ///< SLURM_STEP_NODELIST: the hosts of the step
  Value slurm_step_tasks_per_node;  ///< SLURM_STEP_TASKS_PER_NODE: tasks on each of these hosts

  /// Returns an Env whose fields hold what `lookup` returns for the names of their variables. For tests.
  static Env from(const std::function<Value(const char*)>& lookup);
  /// Returns the names of the LOCKSTEP_ variables.
  static std::vector<std::string> lockstep_names();
  /// Returns the environment of this process. The first call reads it; later calls return the same values. Thread-safe.
  static const Env& this_process();
};

}  // namespace lockstep::base
