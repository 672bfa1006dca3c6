// Writes the batch script of `lockstep submit`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/cli/submit_options.h"

namespace lockstep::launcher {

/// What a script depends on besides the options.
struct BatchContext {
  std::string directory;  ///< absolute path; where the job is submitted and runs
  std::string lockstep;   ///< path of lockstep on the nodes
};

/// Returns the script: #SBATCH lines, then `lockstep run` with every word quoted for bash. Requires bash 4.2 and sbatch
/// 22.05 or newer. Pure.
/// - Output: OUTPUT/JOB.out for the job, OUTPUT/JOB/rank.N.out and .err for the ranks; after K requeues OUTPUT/JOB.K/.
/// JOB is the job id, in an array ARRAY_INDEX.
/// - SLURM sends SIGUSR1 to the shell alone, which forwards it to `lockstep run`. SLURM sends SIGTERM to every process
/// of a job that it ends; the shell does not forward it, because `lockstep run` kills its ranks on a second one. After
/// SIGTERM the job is not requeued.
/// - The exit code is that of `lockstep run`. Exit code 75 requeues the job.
/// Throws UsageError if `context.directory` contains line breaks.
std::string batch_script(const SubmitOptions& submit, const BatchContext& context);

/// The options of the script's #SBATCH lines for sbatch's own command line, where they take precedence over SBATCH_*
/// variables.
std::vector<std::string> sbatch_arguments(const SubmitOptions& submit, const BatchContext& context);

/// Quotes `word` so that bash reads it as one word on one line; returns it unchanged if bash already does.
std::string shell_quote(std::string_view word);

/// Quotes `word` so that sbatch reads it as one word of an #SBATCH line. It must not contain line breaks.
std::string sbatch_quote(std::string_view word);

}  // namespace lockstep::launcher
