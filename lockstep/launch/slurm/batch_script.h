// The batch script of `lockstep submit`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/cli/submit_options.h"

namespace lockstep::launcher {

/// What a script depends on beside its options.
struct BatchContext {
  std::string directory;  ///< absolute; where it is submitted, and where the job runs
  std::string lockstep;   ///< path of the program on the nodes
};

/// The script: #SBATCH lines, then `lockstep run` with every word quoted for bash. Pure. For bash from 4.2 and sbatch
/// from 22.05.
/// - Logs: OUTPUT/JOB.out of the job, OUTPUT/JOB/rank.N.out and .err of ranks; when it was requeued K times
/// OUTPUT/JOB.K/. JOB is the job's number,
///   of an array ARRAY_INDEX.
/// - SIGUSR1, which SLURM sends to the shell alone, goes on to `lockstep run`. SIGTERM, which SLURM sends to every
/// process of a job that it ends,
///   does not, for a second one there kills; after it the job is not requeued.
/// - The exit code is that of `lockstep run`. With code 75 the job is requeued.
/// Throws UsageError when folder has line breaks.
std::string batch_script(const SubmitOptions& submit, const BatchContext& context);

/// The words of the script's #SBATCH lines, for sbatch's own command line, where SBATCH_* variables do not take their
/// place.
std::vector<std::string> sbatch_arguments(const SubmitOptions& submit, const BatchContext& context);

/// `word` as bash reads it as one word, on one line whatever is in it; as it is when that does.
std::string shell_quote(std::string_view word);

/// `word` as sbatch reads it as one word of an #SBATCH line; it has no line breaks.
std::string sbatch_quote(std::string_view word);

}  // namespace lockstep::launcher
