// The command `lockstep submit`: submits a SLURM batch job that starts ranks.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher::slurm {

/// Runs `lockstep submit` with the arguments after `submit`: prints the script, creates the output directory, passes
/// the script to sbatch, prints the job id, and saves the script as OUTPUT/JOB.sh. With --follow, follows the job
/// (follow_job()). Returns 0, or with --follow the exit code of the job. Blocks for at most one minute for sbatch, and
/// with --follow until the job has ended.
///
/// Throws UsageError for invalid arguments, if SLURM is not installed, and if sbatch rejects the job; throws
/// SystemError. After an error no job was submitted, unless the message says that one may have been.
int submit(std::vector<std::string> arguments);

}  // namespace lockstep::launcher::slurm
