// The command line of the program `lockstep`: its subcommands and the options of `lockstep run`.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/cli/doctor_options.h"
#include "lockstep/launch/cli/host_options.h"

namespace lockstep::launcher {

/// The options of `lockstep run`.
struct RunOptions : HostOptions {
  /// In all. 0: all slots of the hosts; a host without slots gets one rank per visible GPU, else one per physical core.
  int ranks = 0;
  bool ship = false;                 ///< copy this program, and the one to run, to hosts that lack them
  std::vector<std::string> exports;  ///< NAME or NAME=VALUE: variables for all ranks
  std::string gpus;                  ///< CUDA_VISIBLE_DEVICES for the ranks; empty: unchanged
  bool isolate_gpus = false;         ///< each rank sees its own GPU only
  bool share_gpus = false;           ///< several ranks may use one GPU
  std::string transport;             ///< LOCKSTEP_TRANSPORT for the ranks; empty: not given
  std::string join_timeout;          ///< LOCKSTEP_JOIN_TIMEOUT for the ranks, seconds; empty: not given
  std::optional<std::chrono::milliseconds> hang_timeout;  ///< without progress of any rank; 0: no limit; default 300 s
  /// Without a heartbeat of a rank. 0: no limit; default 30 s, or 0 if hang_timeout is 0.
  std::optional<std::chrono::milliseconds> stall_timeout;
  std::string name;                 ///< of the run, whose files go to runs/NAME; empty: the program's name and the time
  bool trace = false;               ///< LOCKSTEP_TRACE for the ranks
  std::string inject;               ///< LOCKSTEP_INJECT for the ranks: a fault to inject; empty: none
  bool bind = true;                 ///< give every rank its own cores
  std::string local_rank_argument;  ///< NAME: every rank gets --NAME=<local rank> as its last argument
  std::string output_dir;           ///< directory for rank.N.out and rank.N.err; empty: none
  bool quiet_ranks = false;         ///< print the output of rank 0 only
  int max_restarts = 0;             ///< how often the job may be restarted after failures that may be transient
  std::chrono::milliseconds restart_pause{1000};  ///< before the first restart; Restarts defines how it grows
  int min_hosts = 0;                           ///< hosts that a restart needs, perhaps with fewer ranks; 0: all hosts
  std::chrono::milliseconds grace{10000};      ///< from SIGTERM to SIGKILL when the user stops the job
  std::chrono::milliseconds fail_grace{2000};  ///< from SIGTERM to SIGKILL after a rank has failed
  std::vector<std::string> command;            ///< the program and its arguments; never empty
};

enum class Subcommand {
  kRun,     ///< starts ranks
  kSubmit,  ///< submits a batch job that starts ranks; submit() parses CommandLine::arguments
  kDoctor,  ///< checks hosts before anything is started
  kStatus,  ///< prints the ranks on this host
  kBench,   ///< measures: the program lockstep-bench, which links libtorch, parses CommandLine::arguments
  kAgent,   ///< is the agent of a host; only the launcher uses it
  kPrint,   ///< prints CommandLine::text: a help text or the version
};

/// The options of `lockstep agent`.
struct AgentOptions {
  bool guarded = false;        ///< a separate process ends the agent's processes if the agent dies
  std::string staged_program;  ///< path of the program to run in place of the job's; empty: the job's
  std::string slurm_step;      ///< a task of this SLURM step waits until the agent ends; empty: none
  std::string waits_in_step;   ///< this process is that task, of this SLURM step; empty: it is an agent
};

struct CommandLine {
  Subcommand subcommand = Subcommand::kPrint;
  RunOptions run;
  std::string text;
  std::vector<std::string> arguments;
  bool json = false;  ///< of kStatus
  AgentOptions agent{};
  DoctorOptions doctor{};
};

/// Parses the arguments of the program `lockstep`. Options end at the first word that is not an option, or at `--`; all
/// further words belong to the program to run. Reads the file that --hostfile names, and nothing else. Throws
/// UsageError or FormatError, one line with the argument, the value and the values expected.
CommandLine parse_command_line(std::vector<std::string> arguments);

}  // namespace lockstep::launcher
