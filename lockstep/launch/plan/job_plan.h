// Computes the arguments, environment, cores and GPUs of each rank from the options of `lockstep run`. Pure functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/job_key.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/plan/host_info.h"
#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::plan {

/// The settings that distinguish one rank from the other ranks of its host.
struct RankPlan {
  int rank = 0;
  process::Environment environment;    ///< added to JobPlan::environment
  std::vector<std::string> arguments;  ///< appended to JobPlan::arguments
  std::vector<int> cpus;               ///< empty: not bound
  bool reads_stdin = false;            ///< its stdin is the launcher's; else it is /dev/null
};

/// What identifies a job to its user.
struct JobLabel {
  std::string id;             ///< random; all generations of the job share it
  std::string name;           ///< of the run: NAME of runs/NAME. Empty for a job that `lockstep run` has not started
  std::string launcher_host;  ///< name of the host of `lockstep run`
  std::int64_t launcher_pid = 0;
  int world_size = 0;
};

/// Everything that an agent needs to run the ranks of its host.
struct JobPlan {
  std::string program;                   ///< path of an executable file
  std::vector<std::string> arguments;    ///< argv, including argv[0]
  std::string directory;                 ///< working directory of the ranks; empty: the agent's own
  bool extends_own_environment = false;  ///< add `environment` to the agent's own, which is that of a login
  process::Environment environment;
  std::vector<RankPlan> ranks;
  std::chrono::milliseconds fail_grace{2000};  ///< time from SIGTERM to SIGKILL for processes that ranks leave behind
  bool measures_activity = false;              ///< whether to measure always if the ranks use CPU time
  std::string run_dir;            ///< directory for stack files; the agent creates it when it writes the first one
  std::size_t output_window = 0;  ///< see output_window()
  job::JobKey key{};              ///< the agent stores it in the ranks' pages
  JobLabel label{};
};

/// The inputs of the plan besides the options and the hosts.
struct LaunchContext {
  process::Environment environment;   ///< environment of the launcher
  std::string program;                ///< path at which the program was found
  bool runs_python = false;           ///< `program` is an interpreter of Python, or a script for one
  std::string directory;              ///< working directory of the ranks, absolute; empty: the launcher's
  std::string launcher_directory;     ///< working directory of the launcher
  std::vector<std::string> exported;  ///< names of the variables given with -x, which all hosts get
  base::net::Address store;
  std::string job;
  std::string name;  ///< of the run
  std::string launcher_host;
  std::int64_t launcher_pid = 0;
  base::net::Address master;  ///< rendezvous address of programs with torch.distributed
  std::string run_dir;        ///< runs/NAME
  int generation = 0;         ///< number of earlier starts of the job
  job::JobKey key{};          ///< unset: a random one for each generation
  int columns = 0;            ///< width of the launcher's terminal; 0: stdout is not a terminal
};

struct Node {
  HostInfo info;
  std::string name;                ///< as the user named it
  int ranks = 0;                   ///< number of its ranks; their numbers follow those of the previous node
  bool is_local = true;            ///< the launcher started its agent directly
  bool reads_key = false;          ///< its agent reads the job's key from LOCKSTEP_KEY_FILE
  bool is_slurm = false;           ///< the host belongs to the SLURM allocation, and SLURM chose its GPUs
  std::string wanted_interface{};  ///< the interface given for it in the host file
  std::string interface{};         ///< the interface whose address its ranks use; empty: all ranks are on one host
  std::size_t number = 0;          ///< index among all hosts of the job
};

int count_ranks(const std::vector<Node>& nodes);

/// Returns the variables of the launcher that the ranks of a host inherit.
process::Environment inherited_environment(const Node& node, const LaunchContext& context);

JobLabel job_label(const LaunchContext& context, int world_size);

/// Returns one plan per node, for its agent. Every node must have at least one rank.
///
/// Ranks on the launcher's host inherit its environment. Ranks on other hosts get the environment of a login there and
/// those variables of the launcher that are exported or for which is_forwarded() is true. In both cases, variables with
/// which another launcher (torchrun, SLURM, PMI) describes a rank are removed. All ranks get the variables LOCKSTEP_*,
/// those of torchrun, and OMP_NUM_THREADS unless it is set. Throws UsageError if a host has too few GPUs.
std::vector<JobPlan> plan_jobs(const cli::RunOptions& options, const LaunchContext& context,
                               const std::vector<Node>& nodes);

/// Returns `environment` with the variables of `exports`, each NAME=VALUE or NAME. Throws UsageError for a NAME that is
/// not set.
process::Environment apply_exports(process::Environment environment, const std::vector<std::string>& exports);

/// Returns whether the launcher sends its variable `name` to other hosts even without -x.
bool is_forwarded(std::string_view name);

/// Returns the number of ranks of a host if neither -n nor slots are given: one per GPU that --gpus or
/// CUDA_VISIBLE_DEVICES leaves, else one per core; at least 1.
int default_ranks(const cli::RunOptions& options, const LaunchContext& context, const Node& node);

/// Returns the number of ranks of each host. Fills the slots in order with `ranks` ranks, or fills all slots if `ranks`
/// is 0; the remaining hosts get 0. Throws a UsageError with both numbers if there are more ranks than slots.
std::vector<int> fill_slots(const std::vector<int>& slots, int ranks);

/// Returns the limits after which ranks count as hanging, from the options, else from LOCKSTEP_TIMEOUT in
/// `environment`.
job::health::HealthLimits health_limits(const cli::RunOptions& options, const process::Environment& environment);

/// Checks the LOCKSTEP_ variables of a rank before it starts. Throws the UsageError that init() would throw. Returns a
/// warning for each variable that does not exist; names that begin with LOCKSTEP_TEST_ are left alone.
std::vector<std::string> check_variables(const process::Environment& environment);

/// Returns how many bytes of one stream of one rank may be on their way between the rank's pipe and their destination.
/// An agent then stops reading the pipe until the launcher acknowledges some. 8 to 256 KiB, and at most 32 MiB for the
/// streams of all ranks together up to 2048 ranks.
std::size_t output_window(std::size_t num_ranks);

/// Returns the prefix of each line of a rank's output: "[rank] ", or "[host:rank] " if `host` is not empty.
std::string rank_prefix(int rank, std::string_view host = {});

}  // namespace lockstep::launcher::plan
