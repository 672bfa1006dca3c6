// Writes the batch script of `lockstep submit`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/cli/submit_options.h"

namespace lockstep::launcher::slurm {

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
