// The environment variables that Lockstep reads, with the checks of their values. Only env.cc calls getenv().
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::base {

// The values of variables and of the options of the same meaning.
inline constexpr std::array kTransports = {"auto", "self", "shm", "hierarchy", "tcp", "mpi", "nccl"};
inline constexpr std::array kCrossHostTransports = {"auto", "tcp", "mpi"};
inline constexpr std::array kRankSources = {"auto", "none", "lockstep", "torchrun", "mpi", "slurm", "pmi", "pod"};
inline constexpr std::array kInstructionSets = {"baseline", "avx2", "avx512"};
inline constexpr std::array kLogLevels = {"quiet", "info"};

/// Returns N for "cuda:N" with N from 0 to 127, -1 for "auto", "cpu" and "cuda", nullopt for other texts.
std::optional<int> device_index(std::string_view text);
inline constexpr const char* kDevices = "auto, cpu, cuda or cuda:N with N from 0 to 127";

/// Reads variables while the members of Env are initialised. An empty value, and one that is not valid, count as not
/// set; check() reports the latter.
class EnvReader {
 public:
  using Value = std::optional<std::string>;
  using Lookup = std::function<Value(const char* name)>;

  EnvReader() = default;
  explicit EnvReader(Lookup lookup) : lookup_(std::move(lookup)) {}

  /// Throws a UsageError that names the first variable whose value is not valid, the value and the values expected.
  void check() const;
  /// The names of the LOCKSTEP_ variables.
  const std::vector<std::string>& lockstep_names() const { return lockstep_names_; }

 protected:
  enum class Least { kMoreThanZero, kNoLimit };  ///< of a time; kNoLimit: 0, which stands for that

  Value text(const char* name);
  Value one_of(const char* name, std::span<const char* const> values);
  Value device(const char* name);
  /// Whether it is `on`.
  std::optional<bool> flag(const char* name, const std::array<const char*, 2>& values, std::string_view on);
  std::optional<std::chrono::milliseconds> seconds(const char* name, Least least);
  std::optional<std::chrono::seconds> whole_seconds(const char* name, int low, int high);

 private:
  void refuse(const char* name, const std::string& value, const std::string& expected);

  Lookup lookup_;
  std::vector<std::string> lockstep_names_;
  std::string error_;
};

/// Every environment variable that Lockstep reads; nullopt if it is not set. docs/reference/environment.md explains the
/// values and the defaults.
struct Env : EnvReader {
  Env() = default;
  using EnvReader::EnvReader;

  // Set by `lockstep run` for its ranks.
  Value lockstep_rank = text("LOCKSTEP_RANK");                          ///< index of this rank, from 0
  Value lockstep_world_size = text("LOCKSTEP_WORLD_SIZE");              ///< number of ranks
  Value lockstep_local_rank = text("LOCKSTEP_LOCAL_RANK");              ///< index of this rank on its host
  Value lockstep_local_world_size = text("LOCKSTEP_LOCAL_WORLD_SIZE");  ///< number of ranks on this host
  Value lockstep_node_rank = text("LOCKSTEP_NODE_RANK");                ///< index of this host
  Value lockstep_num_nodes = text("LOCKSTEP_NUM_NODES");                ///< number of hosts
  Value lockstep_store = text("LOCKSTEP_STORE");                        ///< host:port of the launcher's store
  Value lockstep_job = text("LOCKSTEP_JOB");                            ///< identifies the job to its store
  Value lockstep_generation = text("LOCKSTEP_GENERATION");  ///< how many times the launcher has started this job before
  Value lockstep_page = text("LOCKSTEP_PAGE");  ///< descriptor of the shared memory with this rank's page (rank_page.h)
  Value lockstep_profile = text("LOCKSTEP_PROFILE");    ///< set by `lockstep plan`: what to record, STEPS:FOLDER
  Value lockstep_terminal = text("LOCKSTEP_TERMINAL");  ///< columns that a rank's line may use on the terminal

  // Set by a user.
  Value lockstep_env_from = one_of("LOCKSTEP_ENV_FROM", kRankSources);   ///< source of the rank's identity
  Value lockstep_transport = one_of("LOCKSTEP_TRANSPORT", kTransports);  ///< by which ranks exchange data
  Value lockstep_device = device("LOCKSTEP_DEVICE");
  std::optional<bool> lockstep_arena = flag("LOCKSTEP_ARENA", {"on", "off"}, "on");
  std::optional<std::chrono::milliseconds> lockstep_timeout =
      seconds("LOCKSTEP_TIMEOUT", Least::kNoLimit);  ///< that a rank waits for ranks that make no progress
  std::optional<std::chrono::seconds> lockstep_host_timeout =
      whole_seconds("LOCKSTEP_HOST_TIMEOUT", 1, 3600);  ///< that another host may send no packet
  std::optional<std::chrono::milliseconds> lockstep_join_timeout =
      seconds("LOCKSTEP_JOIN_TIMEOUT", Least::kMoreThanZero);  ///< that init() waits for all ranks
  Value lockstep_interface = text("LOCKSTEP_INTERFACE");       ///< network interface for traffic between ranks
  Value lockstep_host_id = text("LOCKSTEP_HOST_ID");  ///< name of this host; ranks with different names share no memory
  Value lockstep_cross_host_transport = one_of("LOCKSTEP_CROSS_HOST_TRANSPORT", kCrossHostTransports);
  Value lockstep_key_file = text("LOCKSTEP_KEY_FILE");  ///< file with the job's key
  Value lockstep_inject = text("LOCKSTEP_INJECT");      ///< a fault to inject, in the syntax of `lockstep run --inject`
  Value lockstep_name = text("LOCKSTEP_NAME");          ///< name of this run
  std::optional<bool> lockstep_trace = flag("LOCKSTEP_TRACE", {"0", "1"}, "1");  ///< whether a Trainer writes a trace
  Value lockstep_instruction_set = one_of("LOCKSTEP_INSTRUCTION_SET", kInstructionSets);
  Value lockstep_log = one_of("LOCKSTEP_LOG", kLogLevels);
  Value lockstep_program = text("LOCKSTEP_PROGRAM");  ///< path of the program `lockstep`, for launch()
  Value lockstep_watch = text("LOCKSTEP_WATCH");  ///< "off" to leave Python programs with torch.distributed unwatched
  Value lockstep_error_hints = text("LOCKSTEP_ERROR_HINTS");  ///< file with rows for the table of error texts
  Value cuda_visible_devices = text("CUDA_VISIBLE_DEVICES");  ///< GPUs that this process may use
  Value nccl_socket_ifname = text("NCCL_SOCKET_IFNAME");      ///< interface that NCCL uses; errors of NCCL mention it
  Value nccl_multi_rank_gpu_enable = text("NCCL_MULTI_RANK_GPU_ENABLE");  ///< 1: NCCL may serve several ranks on a GPU
  Value home = text("HOME");
  Value xdg_cache_home = text("XDG_CACHE_HOME");  ///< directory for caches (default: ~/.cache)
  Value path = text("PATH");                      ///< directories in which programs are looked up
  Value columns = text("COLUMNS");                ///< width of the terminal
  Value term = text("TERM");                      ///< "dumb" disables redrawing

  // Set by torchrun, and by scripts that use env://.
  Value rank = text("RANK");
  Value world_size = text("WORLD_SIZE");
  Value local_rank = text("LOCAL_RANK");
  Value local_world_size = text("LOCAL_WORLD_SIZE");
  Value group_rank = text("GROUP_RANK");              ///< index of this host
  Value group_world_size = text("GROUP_WORLD_SIZE");  ///< number of hosts
  Value master_addr = text("MASTER_ADDR");
  Value master_port = text("MASTER_PORT");
  Value torchelastic_run_id = text("TORCHELASTIC_RUN_ID");  ///< set by torchrun only
  Value torchelastic_restart_count = text("TORCHELASTIC_RESTART_COUNT");
  Value torchelastic_use_agent_store = text("TORCHELASTIC_USE_AGENT_STORE");  ///< True when torchrun holds MASTER_PORT

  // Set in each pod by operators of Kubernetes and other platforms (job/identity/pod.h).
  Value pet_node_rank = text("PET_NODE_RANK");            ///< index of this pod
  Value pet_nnodes = text("PET_NNODES");                  ///< number of pods, or a range such as 1:4
  Value pet_nproc_per_node = text("PET_NPROC_PER_NODE");  ///< ranks in each pod: a number, auto, gpu or cpu
  Value pet_master_addr = text("PET_MASTER_ADDR");        ///< host name of pod 0
  Value pet_master_port = text("PET_MASTER_PORT");
  Value nproc_per_node = text("NPROC_PER_NODE");              ///< ranks in each pod
  Value job_completion_index = text("JOB_COMPLETION_INDEX");  ///< index of this pod
  Value sm_hosts = text("SM_HOSTS");                          ///< names of all hosts, as a list in JSON
  Value sm_current_host = text("SM_CURRENT_HOST");            ///< name of this host

  // Set by mpirun (Open MPI) and by other launchers that implement PMI.
  Value ompi_comm_world_rank = text("OMPI_COMM_WORLD_RANK");
  Value ompi_comm_world_size = text("OMPI_COMM_WORLD_SIZE");
  Value ompi_comm_world_local_rank = text("OMPI_COMM_WORLD_LOCAL_RANK");
  Value ompi_comm_world_local_size = text("OMPI_COMM_WORLD_LOCAL_SIZE");
  /// File with the hosts of mpirun. The operator of Kubeflow sets it in the pod that starts the others.
  Value ompi_default_hostfile = text("OMPI_MCA_orte_default_hostfile");
  Value pmix_namespace = text("PMIX_NAMESPACE");  ///< the launcher's name of the job
  Value pmix_rank = text("PMIX_RANK");
  Value pmi_rank = text("PMI_RANK");
  Value pmi_size = text("PMI_SIZE");
  Value pmi_jobid = text("PMI_JOBID");
  Value pmi_fd = text("PMI_FD");  ///< descriptor of the connection to the launcher
  // The next two are set by Hydra, the mpiexec of MPICH and Intel MPI.
  Value mpi_localrankid = text("MPI_LOCALRANKID");  ///< index of this rank on its host
  Value mpi_localnranks = text("MPI_LOCALNRANKS");  ///< number of ranks on this host

  // Set by SLURM, in an allocation and in the tasks of a step.
  Value slurm_job_id = text("SLURM_JOB_ID");
  Value slurm_job_nodelist = text("SLURM_JOB_NODELIST");  ///< the hosts of the allocation, in SLURM's short form
  Value slurmd_nodename = text("SLURMD_NODENAME");  ///< SLURM's name for this host, set on the hosts of an allocation
  Value slurm_tasks_per_node = text("SLURM_TASKS_PER_NODE");    ///< tasks on each of these hosts, such as 2(x2),1
  Value slurm_ntasks_per_node = text("SLURM_NTASKS_PER_NODE");  ///< tasks per host that the user requested
  Value slurm_het_size = text("SLURM_HET_SIZE");                ///< components of a heterogeneous job
  Value slurm_restart_count = text("SLURM_RESTART_COUNT");      ///< how many times the job was requeued
  Value slurm_step_id = text("SLURM_STEP_ID");                  ///< set by srun; not set in a batch script
  Value slurm_procid = text("SLURM_PROCID");                    ///< index of this task; also set in a batch script
  Value slurm_ntasks = text("SLURM_NTASKS");                    ///< number of tasks
  Value slurm_localid = text("SLURM_LOCALID");                  ///< index of this task on its host
  Value slurm_nodeid = text("SLURM_NODEID");                    ///< index of this host
  Value slurm_step_num_nodes = text("SLURM_STEP_NUM_NODES");    ///< number of hosts of the step
  Value slurm_step_nodelist = text("SLURM_STEP_NODELIST");      ///< the hosts of the step
  Value slurm_step_tasks_per_node = text("SLURM_STEP_TASKS_PER_NODE");  ///< tasks on each of these hosts

  /// Returns the environment of this process. The first call reads it; later calls return the same values. Thread-safe.
  static const Env& this_process();
};

/// What `lockstep plan` asks of a program that it runs: to record so many steps, and to write files only below
/// `folder`.
struct ProfileRequest {
  int steps = 0;
  std::string folder;
};
/// Returns the request in LOCKSTEP_PROFILE; nullopt in any other run. Throws UsageError.
std::optional<ProfileRequest> profile_request();

}  // namespace lockstep::base
