// The directory of a run: a new one, or the existing one that the run resumes in.
#pragma once

#include <string>

namespace lockstep::training::inline loggers {

struct RunDirectoryOptions {
  std::string folder = {};     ///< "runs": parent of the run directories
  std::string name = {};       ///< "mnist"
  bool resume_newest = false;  ///< resume in the newest run of that name, if there is one
  std::string job = {};        ///< name of the job, from the launcher
  int generation = 0;          ///< restarts of the job so far; above 0 the run resumes in the directory of this job
};

struct RunDirectory {
  std::string path;         ///< "runs/mnist-2"
  bool is_resumed = false;  ///< the directory existed
};

/// Finds or creates the directory and writes the job's name into it. A created directory belongs to this run alone,
/// also when other processes call this function at the same time. Called on one rank. Throws SystemError.
RunDirectory open_run_directory(const RunDirectoryOptions& options);

/// Name of the running program, the default name of a run.
std::string program_name();

}  // namespace lockstep::training::inline loggers
