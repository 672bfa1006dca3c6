// The command line of the program `lockstep`: its subcommands and the options of `lockstep run`.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/timeouts.h"
#include "lockstep/launch/cli/host_list.h"

namespace lockstep::launcher::cli {

/// The options that choose the hosts and how to reach them, of all subcommands that use several hosts.
struct HostOptions {
  std::vector<HostSpec> hosts = {};  ///< empty: all hosts of our SLURM allocation, else this host
  std::string remote_path = {};      ///< path of lockstep on the other hosts; empty: its path on this host
  /// "JOB.STEP": on other hosts a task of this SLURM step waits until the agent ends; may be empty.
  std::string slurm_step = {};
  std::chrono::seconds connect_timeout = base::kDefaultConnectTimeout;  ///< for ssh
  std::string directory = {};     ///< working directory of the ranks on every host; empty: the launcher's
  std::string interface = {};     ///< for parse_interface_filter(); empty: the one that routes to the launcher
  std::string env_from = "auto";  ///< source of the hosts if `hosts` is empty: auto, slurm or none
};

/// Which ranks are bound to cores of their own.
enum class Bind {
  kAuto,   ///< all, except programs in Python that would get a single core, which their workers would inherit
  kCores,  ///< all
  kNone
};
/// The ranks that read the launcher's standard input; the others read /dev/null.
enum class StdinRanks { kNone, kRankZero, kAll };

/// The options of `lockstep run`; its --help says what they do. plan::health_limits() has the defaults of time limits.
struct RunOptions : HostOptions {
  int ranks = 0;                          ///< total number of ranks; 0: all slots of the hosts
  bool ship = false;                      ///< copy this program, and the one to run, to hosts that lack them
  std::vector<std::string> exports = {};  ///< environment variables for all ranks: NAME or NAME=VALUE
  std::string gpus = {};                  ///< CUDA_VISIBLE_DEVICES for the ranks; empty: unchanged
  bool isolate_gpus = false;              ///< each rank sees only its own GPU
  bool share_gpus = false;                ///< several ranks may use one GPU
  std::string transport = {};             ///< LOCKSTEP_TRANSPORT for the ranks; empty: not given
  std::optional<std::chrono::milliseconds> join_timeout = {};  ///< LOCKSTEP_JOIN_TIMEOUT for the ranks
  std::optional<std::chrono::milliseconds> hang_timeout = {};  ///< 0: no limit
  std::optional<std::chrono::milliseconds> host_timeout = {};
  std::optional<std::chrono::milliseconds> stall_timeout = {};  ///< 0: no limit
  std::optional<std::chrono::milliseconds> work_timeout = {};   ///< 0: no limit
  std::chrono::milliseconds idle_timeout{0};  ///< maximum time in which no process uses CPU time; 0: no limit
  std::string name = {};    ///< name of the run; its files are in runs/NAME; empty: the program's name and the time
  bool trace = false;       ///< LOCKSTEP_TRACE for the ranks
  std::string inject = {};  ///< LOCKSTEP_INJECT for the ranks: a fault to inject; empty: none
  Bind bind = Bind::kAuto;
  std::string local_rank_argument = {};  ///< if not empty, every rank gets --NAME=<local rank> as its last argument
  StdinRanks stdin_ranks = StdinRanks::kNone;
  std::string output_dir = {};                    ///< directory for rank.N.out and rank.N.err; empty: none
  bool quiet_ranks = false;                       ///< print the output of rank 0 only
  int max_restarts = 0;                           ///< maximum number of restarts after failures that may be transient
  std::chrono::milliseconds restart_pause{1000};  ///< pause before the first restart; see Restarts
  int retry_exit_code = 0;                        ///< exit code of failures that may be transient; 0: that of the cause
  int min_hosts = 0;  ///< minimum number of hosts for a restart, perhaps with fewer ranks; 0: all hosts
  std::chrono::milliseconds grace{10000};      ///< time from the first signal to SIGKILL when the user stops the job
  std::chrono::milliseconds fail_grace{2000};  ///< time from SIGTERM to SIGKILL after a rank has failed
  std::vector<std::string> command = {};       ///< the program and its arguments; never empty
};

enum class Subcommand {
  kRun,       ///< starts ranks
  kSubmit,    ///< submits a batch job that starts ranks; submit() parses CommandLine::arguments
  kDoctor,    ///< checks hosts before anything is started
  kPlan,      ///< runs a program for some steps and predicts its steps on other clusters
  kStatus,    ///< prints the ranks on this host
  kBench,     ///< executes lockstep-bench, which links libtorch and parses CommandLine::arguments
  kBuild,     ///< compiles the extension of the Python package for the Python CommandLine::python
  kAgent,     ///< runs the agent of a host; only the launcher uses it
  kCmakeDir,  ///< prints the folder of the installed CMake package
  kPrint,     ///< prints CommandLine::text: a help text or the version
};

struct AgentOptions {
  bool guarded = false;             ///< a guard process kills the agent's processes if the agent dies
  std::string staged_program = {};  ///< path of the program to run instead of the job's; empty: the job's
  std::string staged_script = {};   ///< folder of the Python script to run instead of the job's; empty: the job's
  std::string staged_hook = {};     ///< folder of the Python hook; empty: the installed one
  std::string slurm_step = {};      ///< a task of this SLURM step waits until the agent ends; empty: none
  bool in_pod = false;              ///< hosts/pods.h has started it: it forwards signals to the launcher
  std::string waits_in_step = {};   ///< this process is the waiting task of this SLURM step; empty: it is an agent
};

struct DoctorOptions : HostOptions {
  bool json = false;                        ///< print one JSON object instead of a table
  bool report = false;                      ///< print what a bug report needs instead of a table
  bool mpi = false;                         ///< also check the requirements of mpirun
  std::uint64_t model_bytes = 250'000'000;  ///< gradient bytes that one step sends
  std::vector<std::string> command = {};    ///< the program to check, and its arguments; may be empty
};

/// The options of `lockstep plan`; its --help says what they do.
struct PlanOptions {
  int ranks = 0;                                 ///< on this host; 0: as `lockstep run`
  std::string gpus = {};                         ///< as RunOptions::gpus
  std::vector<int> nodes = {2, 4, 8};            ///< numbers of hosts
  std::vector<double> links = {1e8, 1e9, 1e10};  ///< bits per second, of each host in each direction
  double latency_s = 50e-6;                      ///< between two hosts, one way
  int steps = 20;                                ///< to record
  std::chrono::seconds start_timeout{600};       ///< until the program has made a step
  int every = 30;                                ///< steps between two exchanges of the methods for slow networks
  bool json = false;
  std::vector<std::string> command = {};  ///< the program and its arguments; never empty
};

/// The parsed command line. Only the members that `subcommand` mentions are set.
struct CommandLine {
  Subcommand subcommand = Subcommand::kPrint;
  RunOptions run;
  std::string text;
  std::vector<std::string> arguments;
  bool json = false;   ///< print JSON; for kStatus
  std::string python;  ///< name or path of an interpreter; empty: the one beside this program, else python3 in PATH
  AgentOptions agent{};
  DoctorOptions doctor{};
  PlanOptions plan{};
};

/// Parses the arguments of the program `lockstep`. Options end at the first word that is not an option, or at `--`; all
/// further words belong to the program to run. Reads no file except that of --hostfile. Throws UsageError or
/// FormatError, whose one-line message has the argument, the value and the values expected.
CommandLine parse_command_line(std::vector<std::string> arguments);

}  // namespace lockstep::launcher::cli
