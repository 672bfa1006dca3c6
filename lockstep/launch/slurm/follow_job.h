// Showing what a job of SLURM's prints until it has ended.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::launcher {

/// A job as sbatch names it.
struct SlurmJob {
  std::string id;
  std::string cluster;  ///< empty: the one of this machine
};

/// What SLURM says of a job.
struct SlurmJobState {
  std::string state;   ///< RUNNING, COMPLETED, ...; empty: it does not know the job
  std::string reason;  ///< why it waits
  int code = 0;        ///< its exit code, 128 + the signal that ended it
};

/// Reads a line of `scontrol --oneliner show job`.
SlurmJobState parse_scontrol(std::string_view line);
/// Reads `sacct --parsable2 --noheader --format=State,ExitCode`.
SlurmJobState parse_sacct(std::string_view text);

/// Whether a job in this state stays so.
bool has_ended(const SlurmJobState& state);
/// What to exit with for a job that has ended: its code, and 1 where that is 0 but the job was not completed.
int exit_code_for(const SlurmJobState& state);

/// Copies what is added to `log`, which need not exist yet, to stdout, and tells on stderr how the job is doing, until
/// it has ended; returns its exit code. Ctrl-C or SIGTERM ends this, not the job; then it returns 128 + the signal.
/// SLURM is asked every second at first, later every 15 s. Blocks all signals of the calling thread, which must be the
/// only one. Throws Error when SLURM has not answered for five minutes, or does not know how the job ended.
int follow_job(const SlurmJob& job, const std::string& log);

}  // namespace lockstep::launcher
