// Starting ranks from inside a program: what mp.spawn is in Python.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

struct LaunchOptions {
  int ranks = 0;                          ///< 0: one for each visible GPU, else one for each physical core
  std::vector<std::string> options = {};  ///< more options of `lockstep run`, such as "--bind=none"
};

/// In a process that is a rank already, whoever has started it (job::identity_source()), returns at once. Otherwise
/// becomes `lockstep run`, which starts this program again with the same arguments, `options.ranks` times; then it does
/// not return. Under srun with one task a host, and `ranks` other than 1, the ranks are that many on each host of the
/// step, numbered across all. Call it first in main, before anything (libtorch, too) has started a thread: exec ends
/// all threads where they stand. The program `lockstep` is the one that LOCKSTEP_PROGRAM names, else the one beside
/// this executable, else the one in PATH. Throws UsageError when there is none, saying where it looked, and for ranks
/// below 0 or above 4096.
void launch(const LaunchOptions& options, int argc, char** argv);

}  // namespace lockstep::launcher
