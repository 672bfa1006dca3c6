// The command `lockstep submit`: writes the script of a SLURM batch job that starts ranks, submits it, and prints its
// output until it has ended.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/cli/submit_options.h"

namespace lockstep::launcher::slurm {

/// Runs `lockstep submit` with the arguments after `submit`: prints the script, creates the output directory, passes
/// the script to sbatch, prints the job id, and saves the script as OUTPUT/JOB.sh. With --follow, follows the job.
/// Returns 0, or with --follow the exit code of the job. Blocks for at most one minute for sbatch, and with --follow
/// until the job has ended.
///
/// Throws UsageError for invalid arguments, if SLURM is not installed, and if sbatch rejects the job; throws
/// SystemError. After an error no job was submitted, unless the message says that one may have been.
int submit(std::vector<std::string> arguments);

/// The state of a job as SLURM reports it.
struct SlurmJobState {
  std::string state;   ///< RUNNING, COMPLETED, ...; empty: SLURM does not know the job
  std::string reason;  ///< why the job is pending
  int code = 0;        ///< the exit code, or 128 + the signal that ended it
};

/// Parses a line of `scontrol --oneliner show job`. Pure.
SlurmJobState parse_scontrol(std::string_view line);
/// Parses the output of `sacct --parsable2 --noheader --format=State,ExitCode`. Pure.
SlurmJobState parse_sacct(std::string_view text);

/// Returns whether a job in this state has ended and will not run again.
bool has_ended(const SlurmJobState& state);
/// Returns the exit code for a job that has ended: that of the job, or 1 if that is 0 but the job did not complete.
int exit_code_for(const SlurmJobState& state);

/// The inputs of a script besides the options.
struct BatchContext {
  std::string directory;  ///< absolute path of the directory in which the job is submitted and runs
  std::string lockstep;   ///< path of lockstep on the nodes
  /// SubmitOptions.output exists when the job starts. Otherwise, with `--dry-run`, SLURM's own file is in `directory`.
  bool has_output_directory = true;
};

/// Returns the script: #SBATCH lines, then `lockstep run` with every word quoted for bash. Requires bash 4.2 and sbatch
/// 22.05 or newer. Pure.
/// - Output: OUTPUT/JOB.out for the job, OUTPUT/JOB/rank.N.out and .err for the ranks; after K requeues OUTPUT/JOB.K/.
///   JOB is the job id; in a job array it is ARRAY_INDEX.
/// - The commands of --before run first, in the script's shell, on the first node; the ranks inherit its environment.
/// - SLURM sends SIGUSR1 only to the shell, which forwards it to `lockstep run`.
/// - When SLURM ends a job, it sends SIGTERM to every process. The shell does not forward it, because `lockstep run`
///   kills its ranks on a second SIGTERM. After SIGTERM the job is not requeued.
/// - The exit code is that of `lockstep run`. Exit code 75 requeues the job.
/// Throws UsageError if `context.directory` contains line breaks.
std::string batch_script(const cli::SubmitOptions& submit, const BatchContext& context);

/// Returns the options of the script's #SBATCH lines, for the command line of sbatch. There they take precedence over
/// SBATCH_* variables.
std::vector<std::string> sbatch_arguments(const cli::SubmitOptions& submit, const BatchContext& context);

/// Quotes `word` so that bash reads it as one word on one line. Returns it unchanged if bash does so without quotes.
std::string shell_quote(std::string_view word);

/// Quotes `word` so that sbatch reads it as one word of an #SBATCH line. It must not contain line breaks.
std::string sbatch_quote(std::string_view word);

}  // namespace lockstep::launcher::slurm
