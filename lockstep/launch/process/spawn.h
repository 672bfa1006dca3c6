// Starts child processes, and replaces this process by a program.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::process {

/// The step in which the start of a child failed.
enum class StartStep : std::int32_t { kFork, kBind, kExec };

/// The report of a child that could not start its program. The child writes it to ChildSpec::failure with one write(),
/// so a reader gets all of it or nothing.
struct StartFailure {
  std::int32_t id = -1;  ///< ChildSpec::id
  StartStep step = StartStep::kFork;
  std::int32_t error = 0;  ///< errno
};

/// A child process to start. Its descriptors are not owned.
struct ChildSpec {
  std::string path;               ///< an executable file; PATH is not searched
  std::vector<std::string> argv;  ///< including argv[0]
  Environment environment;
  std::string directory{};      ///< working directory; empty: this process's
  int in = -1;                  ///< its stdin; -1: this process's
  int out = -1;                 ///< its stdout; -1: this process's
  int err = -1;                 ///< its stderr; -1: this process's
  int inherited = -1;           ///< a further descriptor, which keeps its number; -1: none
  std::vector<int> cpus{};      ///< the CPUs that it runs on; empty: all
  std::uint64_t max_files = 0;  ///< soft limit of its descriptors; 0: this process's
  /// The signal that the kernel sends to it when the calling thread, which must be the main thread, ends; 0: none.
  int death_signal = SIGKILL;
  int failure = -1;  ///< receives the child's StartFailure; -1: none
  int id = -1;       ///< StartFailure::id
};

/// Starts the child and returns its pid. The child leads a new session and process group, so that Ctrl-C in the
/// terminal does not signal it. It has default signal handling, and only the descriptors that `spec` names. Does not
/// wait until its program runs. Throws SystemError if fork() fails; after a later failure, the child writes a
/// StartFailure (except if it cannot change to its directory) and exits with code 127. May be called while other
/// threads run.
pid_t spawn(const ChildSpec& spec);

/// Replaces this process by the program at `path`. Returns only on failure, with errno.
int exec_program(const std::string& path, const std::vector<std::string>& argv);

}  // namespace lockstep::launcher::process
