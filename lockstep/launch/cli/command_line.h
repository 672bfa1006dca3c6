// The command line of the program `lockstep`.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/cli/doctor_options.h"
#include "lockstep/launch/cli/host_options.h"

namespace lockstep::launcher {

/// What `lockstep run` was asked for.
struct RunOptions : HostOptions {
  int ranks =
      0;  ///< in all; 0: all slots of the hosts; of one without slots one for each visible GPU, else each physical core
  bool ship = false;                 ///< copy this program, and the one to run, to hosts that lack them
  std::vector<std::string> exports;  ///< NAME or NAME=VALUE: variables that go to all ranks
  std::string gpus;                  ///< CUDA_VISIBLE_DEVICES of the ranks; empty: as it is
  bool isolate_gpus = false;         ///< each rank sees one GPU only
  bool share_gpus = false;           ///< several ranks may use one GPU
  std::string transport;             ///< LOCKSTEP_TRANSPORT for the ranks; empty: not given
  std::string join_timeout;          ///< LOCKSTEP_JOIN_TIMEOUT for the ranks, seconds; empty: not given
  std::optional<std::chrono::milliseconds> hang_timeout;  ///< without progress of any rank; 0: for ever; default 300 s
  std::optional<std::chrono::milliseconds>
      stall_timeout;   ///< without a sign of life of a rank; 0: for ever; default 30 s, or 0 when hang_timeout is
  std::string name;    ///< of the run: what is written about it goes to runs/NAME; empty: the program's and the time
  bool trace = false;  ///< LOCKSTEP_TRACE for the ranks
  std::string inject;  ///< LOCKSTEP_INJECT for the ranks: a fault on purpose; empty: none
  bool bind = true;    ///< give every rank its own cores
  std::string local_rank_argument;  ///< NAME: every rank gets --NAME=<local rank> as last argument
  std::string output_dir;           ///< rank.N.out and rank.N.err go there as well; empty: nowhere
  bool quiet_ranks = false;         ///< show the output of rank 0 only
  int max_restarts = 0;             ///< how often the job is started again after a failure that is not the user's
  std::chrono::milliseconds restart_pause{1000};  ///< before the first one; Restarts says how it grows
  int min_hosts = 0;                              ///< that a restart needs, which may have fewer ranks then; 0: all
  std::chrono::milliseconds grace{10000};         ///< from SIGTERM to SIGKILL when a person stops the job
  std::chrono::milliseconds fail_grace{2000};     ///< the same when a rank has failed
  std::vector<std::string> command;               ///< the program and its arguments; never empty
};

enum class Subcommand {
  kRun,     ///< start ranks
  kSubmit,  ///< queue a batch job that starts ranks: submit() goes on with CommandLine::words
  kDoctor,  ///< look at hosts before anything is started
  kStatus,  ///< show the ranks that run here
  kBench,   ///< measure: the program lockstep-bench, which has torch, goes on with CommandLine::words
  kAgent,   ///< be the agent of a host; the launcher calls this, not a person
  kPrint,   ///< help or version: show CommandLine::text
};

/// What `lockstep agent` is to be.
struct AgentOptions {
  bool guarded = false;        ///< a process of its own ends what it leaves when it dies
  std::string staged_program;  ///< path of the program to run, whatever the job says; empty: as that says
  std::string slurm_step;      ///< of this SLURM step a task waits for its end; empty: none
  std::string waits_in_step;   ///< it is that task, of this step; empty: an agent
};

struct CommandLine {
  Subcommand subcommand = Subcommand::kPrint;
  RunOptions run;
  std::string text;
  std::vector<std::string> words;
  bool json = false;  ///< of kStatus
  AgentOptions agent{};
  DoctorOptions doctor{};
};

/// Reads the arguments after the program's name. Pure, but for the file that --hostfile names. Throws UsageError, one
/// line that names the argument, the value got and the values allowed. Options end at the first word that is none, or
/// at `--`; the rest belongs to the program.
CommandLine parse_command_line(std::vector<std::string> arguments);

}  // namespace lockstep::launcher
