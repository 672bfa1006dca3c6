// The command `lockstep submit`.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

/// Runs `lockstep submit` with the arguments after it: prints the script, creates the output directory, passes the
/// script to sbatch, prints the job id, saves the script as OUTPUT/JOB.sh and, with --follow, follows the job. Returns
/// the exit code: 0, or with --follow the job's. Blocks for at most one minute for sbatch; with --follow until the job
/// has ended. Throws UsageError for invalid arguments and if SLURM is not installed or sbatch rejects the job, and
/// SystemError. In these cases nothing was submitted, unless the error says that it may have been.
int submit(std::vector<std::string> arguments);

}  // namespace lockstep::launcher
