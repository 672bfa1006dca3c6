// The options of `lockstep submit`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::cli {

/// The options of `lockstep submit`. Texts are those of the command line, and have been checked. An empty text means
/// that the option is not given and that SLURM decides.
struct SubmitOptions {
  std::string nodes = {};          ///< "16", or "2-4"
  int ranks = 0;                   ///< total number of ranks; 0: not given
  int ranks_per_node = 0;          ///< 0: not given; one per GPU if GPUs are requested and `ranks` is not given
  std::string gpus_per_node = {};  ///< "8", or "a100:8"
  int cpus_per_rank = 0;           ///< 0: not given
  std::string mem = {};            ///< memory per node
  std::string time = {};           ///< the time limit, in one of SLURM's forms
  std::string partition = {};
  std::string account = {};
  std::string array = {};
  std::string name = {};                      ///< name of the job; never empty
  std::string output = "logs";                ///< directory of the logs
  bool requeue = true;                        ///< requeue the job if it ends with exit code 75
  int signal_before = 120;                    ///< seconds between the signal to stop and the time limit; 0: no signal
  std::string remote_path = {};               ///< path of lockstep on the nodes; empty: its path on this host
  std::vector<std::string> run_options = {};  ///< options for `lockstep run`
  std::string mail = {};                      ///< address of SLURM's messages about the job
  std::vector<std::string> before = {};       ///< commands of bash that prepare the environment; one line each
  std::vector<std::vector<std::string>> grid = {};  ///< the arguments that each task of the array adds to `command`
  std::vector<std::vector<std::string>> sbatch_options = {};  ///< options for sbatch, one or two words each
  bool dry_run = false;                                       ///< print the script only
  bool follow = false;                                        ///< print the job's output until it has ended
  std::vector<std::string> command = {};                      ///< the program and its arguments; never empty
};

struct SubmitCommand {
  SubmitOptions options;
  std::string help;  ///< the help text if --help is given, in which case `options` is not set
};

/// Parses the words after `lockstep submit`. Pure. Throws UsageError, whose one-line message has the argument, the
/// value and the values expected.
///
/// Options that `lockstep submit` does not have are passed on to sbatch. These rules decide whether the word after such
/// an option is its value:
/// - An option with an attached value (--qos=high, -wn1) or without a value (--exclusive, --hold, -H) does not take the
///   next word.
/// - A word that begins with '-' is never a value.
/// - If `--` follows later, the word is the value.
/// - Otherwise the word could also be the program, which is an error.
///
/// The program begins after the first `--`, or at the first word that is neither an option nor an option's value.
SubmitCommand parse_submit_options(std::vector<std::string> words);

/// Converts a time limit in one of SLURM's forms (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s) to seconds. Returns nullopt
/// for other texts.
std::optional<std::int64_t> parse_time_limit(std::string_view text);

}  // namespace lockstep::launcher::cli
