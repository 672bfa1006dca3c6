// Starts the ranks of a program from that program itself, as torch.multiprocessing.spawn() does in Python.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

struct LaunchOptions {
  int ranks = 0;                          ///< 0: one per visible GPU, else one per physical core
  int nodes = 1;                          ///< hosts of the SLURM allocation; above 1, `ranks` is the number on each
  std::vector<std::string> options = {};  ///< further options of `lockstep run`, such as "--bind=none"
};

/// Returns at once if this process already is a rank, whichever launcher started it (see
/// job::identity::identity_source()). Otherwise does not return: replaces the process by `lockstep run`, which starts
/// this program `options.ranks` times on each of `options.nodes` hosts, with the same arguments.
///
/// Under srun with one task per host, and if `ranks` is not 1, each host of the step gets `ranks` ranks. The numbers of
/// the ranks are consecutive over all hosts.
///
/// Call launch() first in main(), before any thread exists (libtorch starts some), because exec() ends all other
/// threads. The program `lockstep` is LOCKSTEP_PROGRAM, else the one in the directory of this executable, else the
/// first in PATH. Throws UsageError if there is none (with the paths searched), if `ranks` or their product with
/// `nodes` is not in [0, 4096], or if `nodes` is not positive. Throws SystemError if `lockstep` cannot be executed.
void launch(const LaunchOptions& options, int argc, char** argv);

}  // namespace lockstep::launcher
