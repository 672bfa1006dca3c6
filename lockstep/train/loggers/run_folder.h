// The folder of a run: which one it is, and whether it was there.
#pragma once

#include <string>

namespace lockstep::train {

struct RunFolderOptions {
  std::string folder;   ///< "runs": where the runs' own folders are
  std::string name;     ///< "mnist"
  bool newest = false;  ///< goes on in the newest run of that name, when there is one
  std::string job;      ///< of the launcher, and
  int generation =
      0;  ///< how often it has started this job before: above 0 the run goes on in the folder that this job had
};

struct RunFolder {
  std::string path;         ///< "runs/mnist-2"
  bool is_resumed = false;  ///< it was there
};

/// Finds it or makes it, and writes the job's name into it. One that was made anew by this call is no other run's,
/// whoever calls this at the same time. Called on one rank. Throws SystemError.
RunFolder open_run_folder(const RunFolderOptions& options);

/// Of the program that runs: the default name.
std::string program_name();

}  // namespace lockstep::train
