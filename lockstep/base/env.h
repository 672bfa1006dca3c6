// The one place where the environment is read.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace lockstep::base {

/// Every variable that Lockstep reads, as text; nothing when it is not set. An empty value counts as not set.
struct Env {
  using Value = std::optional<std::string>;

  // Set by `lockstep run` for its ranks.
  Value lockstep_rank;              ///< LOCKSTEP_RANK: number of this rank, from 0
  Value lockstep_world_size;        ///< LOCKSTEP_WORLD_SIZE: number of ranks
  Value lockstep_local_rank;        ///< LOCKSTEP_LOCAL_RANK: number of this rank on its host
  Value lockstep_local_world_size;  ///< LOCKSTEP_LOCAL_WORLD_SIZE: number of ranks on this host
  Value lockstep_node_rank;         ///< LOCKSTEP_NODE_RANK: number of this host
  Value lockstep_num_nodes;         ///< LOCKSTEP_NUM_NODES: number of hosts
  Value lockstep_store;             ///< LOCKSTEP_STORE: host:port of the launcher's store
  Value lockstep_job;               ///< LOCKSTEP_JOB: identifies the job to its store
  Value lockstep_generation;        ///< LOCKSTEP_GENERATION: how often the launcher has started this job before
  Value lockstep_page;      ///< LOCKSTEP_PAGE: descriptor of the memory in which this rank shows itself to its agent
  Value lockstep_terminal;  ///< LOCKSTEP_TERMINAL: columns that a rank's line has on the launcher's terminal, when it
                            ///< is one

  // Set by a user.
  Value lockstep_env_from;   ///< LOCKSTEP_ENV_FROM: which contract to read: none, lockstep, torchrun, mpi, slurm or pmi
  Value lockstep_transport;  ///< LOCKSTEP_TRANSPORT: auto, self, shm, hierarchy, gloo, mpi or nccl
  Value lockstep_device;   ///< LOCKSTEP_DEVICE: auto, cpu, cuda or cuda:N; by default a rank has a GPU when it sees one
  Value lockstep_arena;    ///< LOCKSTEP_ARENA: on or off; by default it is on when ranks share a host
  Value lockstep_timeout;  ///< LOCKSTEP_TIMEOUT: seconds that a rank waits for others that make no progress, default
                           ///< 300; 0: for ever
  Value lockstep_join_timeout;  ///< LOCKSTEP_JOIN_TIMEOUT: seconds that init() waits for all ranks to come, default 60
  Value lockstep_interface;     ///< LOCKSTEP_INTERFACE: network interface for traffic between ranks
  Value lockstep_host_id;       ///< LOCKSTEP_HOST_ID: a name for this host; ranks with different names share no memory
  Value lockstep_cross_host_transport;  ///< LOCKSTEP_CROSS_HOST_TRANSPORT: what carries bytes between hosts: auto, gloo
                                        ///< or mpi
  Value lockstep_key_file;  ///< LOCKSTEP_KEY_FILE: a file with the job's key, where no launcher of ours gives one
  Value lockstep_inject;    ///< LOCKSTEP_INJECT: a fault that is to happen, as --inject of `lockstep run` takes it
  Value lockstep_name;      ///< LOCKSTEP_NAME: of this run, as --name of `lockstep run` takes it: what a Trainer writes
                            ///< lies in runs/NAME
  Value
      lockstep_trace;  ///< LOCKSTEP_TRACE: 1: a Trainer writes a trace of its steps, as with --trace of `lockstep run`
  Value lockstep_log;  ///< LOCKSTEP_LOG: quiet, info (default) or debug
  Value lockstep_program;      ///< LOCKSTEP_PROGRAM: path of the program `lockstep`, for launch()
  Value omp_num_threads;       ///< OMP_NUM_THREADS: kept when it is set
  Value cuda_visible_devices;  ///< CUDA_VISIBLE_DEVICES: GPUs that the user allows
  Value nccl_socket_ifname;    ///< NCCL_SOCKET_IFNAME: interface that NCCL itself reads, named in its errors
  Value path;                  ///< PATH: where programs are looked for
  Value tmpdir;                ///< TMPDIR: where sockets between ranks of a host are made, default /tmp
  Value columns;               ///< COLUMNS: width of the terminal
  Value term;                  ///< TERM: "dumb" switches redrawing off

  // The contract of torchrun and of scripts that set it by hand (env://).
  Value rank;                          ///< RANK
  Value world_size;                    ///< WORLD_SIZE
  Value local_rank;                    ///< LOCAL_RANK
  Value local_world_size;              ///< LOCAL_WORLD_SIZE
  Value group_rank;                    ///< GROUP_RANK: number of this host
  Value group_world_size;              ///< GROUP_WORLD_SIZE: number of hosts
  Value master_addr;                   ///< MASTER_ADDR
  Value master_port;                   ///< MASTER_PORT
  Value torchelastic_run_id;           ///< TORCHELASTIC_RUN_ID: set by torchrun only
  Value torchelastic_restart_count;    ///< TORCHELASTIC_RESTART_COUNT
  Value torchelastic_use_agent_store;  ///< TORCHELASTIC_USE_AGENT_STORE: True when torchrun holds MASTER_PORT

  // The contracts of mpirun (Open MPI) and of other launchers that speak PMI.
  Value ompi_comm_world_rank;        ///< OMPI_COMM_WORLD_RANK
  Value ompi_comm_world_size;        ///< OMPI_COMM_WORLD_SIZE
  Value ompi_comm_world_local_rank;  ///< OMPI_COMM_WORLD_LOCAL_RANK
  Value ompi_comm_world_local_size;  ///< OMPI_COMM_WORLD_LOCAL_SIZE
  Value pmix_namespace;              ///< PMIX_NAMESPACE: the launcher's name of the job
  Value pmix_rank;                   ///< PMIX_RANK
  Value pmi_rank;                    ///< PMI_RANK
  Value pmi_size;                    ///< PMI_SIZE
  Value pmi_jobid;                   ///< PMI_JOBID
  Value pmi_fd;                      ///< PMI_FD: descriptor on which the launcher answers
  Value mpi_localrankid;  ///< MPI_LOCALRANKID: number of this rank on its host; set by hydra, the mpiexec of MPICH and
                          ///< Intel MPI
  Value mpi_localnranks;  ///< MPI_LOCALNRANKS: number of ranks on this host; likewise

  // SLURM's, in an allocation and in the tasks of a step.
  Value slurm_job_id;               ///< SLURM_JOB_ID
  Value slurm_job_nodelist;         ///< SLURM_JOB_NODELIST: the allocation's hosts, in SLURM's short form
  Value slurmd_nodename;            ///< SLURMD_NODENAME: SLURM's name for this host, set on the hosts of an allocation
  Value slurm_tasks_per_node;       ///< SLURM_TASKS_PER_NODE: tasks on each of them, as 2(x2),1
  Value slurm_ntasks_per_node;      ///< SLURM_NTASKS_PER_NODE: what the user asked for
  Value slurm_restart_count;        ///< SLURM_RESTART_COUNT: how often the job was requeued
  Value slurm_step_id;              ///< SLURM_STEP_ID: set by srun; a batch script has none
  Value slurm_procid;               ///< SLURM_PROCID: number of this task; also set in a batch script
  Value slurm_ntasks;               ///< SLURM_NTASKS: number of tasks
  Value slurm_localid;              ///< SLURM_LOCALID: number of this task on its host
  Value slurm_nodeid;               ///< SLURM_NODEID: number of this host
  Value slurm_step_num_nodes;       ///< SLURM_STEP_NUM_NODES: number of hosts of the step
  Value slurm_step_nodelist;        ///< SLURM_STEP_NODELIST: the step's hosts
  Value slurm_step_tasks_per_node;  ///< SLURM_STEP_TASKS_PER_NODE: tasks on each of them

  /// Fills every field by asking `lookup` for its variable's name. Tests give a map here.
  static Env from(const std::function<Value(const char*)>& lookup);
  /// The environment of this process, read once, at the first call.
  static const Env& this_process();
};

}  // namespace lockstep::base
