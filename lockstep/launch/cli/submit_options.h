// The command line of `lockstep submit`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// What `lockstep submit` was asked for. Texts are those of the command line, checked; empty: not given, and SLURM
/// decides.
struct SubmitOptions {
  std::string nodes;          ///< "16", or "2-4"
  int ranks = 0;              ///< in all; 0: not given
  int ranks_per_node = 0;     ///< 0: not given; one for each GPU when GPUs are asked for and ranks is not
  std::string gpus_per_node;  ///< "8", or "a100:8"
  int cpus_per_rank = 0;      ///< 0: not given
  std::string mem;            ///< of each node
  std::string time;           ///< the limit, in a form of SLURM's
  std::string partition;
  std::string account;
  std::string array;
  std::string name;                                      ///< of the job; never empty
  std::string output = "logs";                           ///< folder of logs
  bool requeue = true;                                   ///< when the job ends with code 75
  int signal_before = 120;                               ///< seconds before the time limit; 0: no signal
  std::string remote_path;                               ///< of lockstep on the nodes; empty: as here
  std::vector<std::string> run_options;                  ///< options for `lockstep run`
  std::vector<std::vector<std::string>> sbatch_options;  ///< options for sbatch, one or two words each
  bool dry_run = false;
  bool follow = false;
  std::vector<std::string> command;  ///< the program and its arguments; never empty
};

struct SubmitCommand {
  SubmitOptions options;
  std::string help;  ///< when help was asked for; then options mean nothing
};

/// Reads the words after `lockstep submit`. Pure. Throws UsageError, one line that names the argument, the value got
/// and the values allowed.
///
/// Options that are not ours are sbatch's. Whether the next word is the value of such an option:
/// - an option with its value attached (--qos=high, -wn1) has it, and one that sbatch knows to stand alone
/// (--exclusive, --hold, -H) takes none;
/// - a word that begins with '-' is never one;
/// - when `--` follows later, the word is the value;
/// - else nobody can tell it from the program, and that is an error.
/// The program begins after the first `--`, or at the first word that is neither an option nor an option's value.
SubmitCommand parse_submit_options(std::vector<std::string> words);

/// The seconds of a time limit as SLURM writes it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s. Nothing for other texts.
std::optional<std::int64_t> parse_time_limit(std::string_view text);

}  // namespace lockstep::launcher
