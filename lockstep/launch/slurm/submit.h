// `lockstep submit`.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

/// Does what the words after `lockstep submit` ask for: shows the script, makes the folder of logs, hands the script to
/// sbatch, prints the job's number, keeps the script as OUTPUT/JOB.sh, and follows the job. Returns the exit code: 0,
/// or with --follow the job's. Waits for sbatch a minute at most; with --follow until the job ends. Throws UsageError
/// when the words are not allowed, SLURM is not installed or sbatch refuses the job, and SystemError; then nothing was
/// submitted, unless the error says that it may have been.
int submit(std::vector<std::string> words);

}  // namespace lockstep::launcher
