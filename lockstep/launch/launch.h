// Starts the ranks of a program from inside that program, as torch.multiprocessing.spawn() does in Python.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

struct LaunchOptions {
  int ranks = 0;                          ///< 0: one per visible GPU, else one per physical core
  std::vector<std::string> options = {};  ///< further options of `lockstep run`, such as "--bind=none"
};

/// Returns at once in a process that is a rank already, whichever launcher started it (see job::identity_source()). In
/// any other process it does not return: it replaces the process by `lockstep run`, which starts this program
/// `options.ranks` times with the same arguments.
///
/// Under srun with one task per host and `ranks` other than 1, each host of the step gets `ranks` ranks, which are
/// numbered over all hosts.
///
/// Call launch() first in main(), before any thread has been started (libtorch starts some): exec ends all other
/// threads at whatever point they are. The program `lockstep` is the one that LOCKSTEP_PROGRAM names, else the one in
/// the directory of this executable, else the first in PATH. Throws UsageError with the paths searched if there is
/// none, and if `ranks` is not in [0, 4096]. Throws SystemError if `lockstep` cannot be executed.
void launch(const LaunchOptions& options, int argc, char** argv);

}  // namespace lockstep::launcher
