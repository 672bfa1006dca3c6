// Writes the stacks of the threads of a process that makes no progress.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher {

/// Returns the state of a process from /proc: R, S, D, T and so on; '?' if there is no such process.
char process_state(pid_t pid);
/// True while the kernel writes a core file of a process that has died.
bool is_dumping_core(pid_t pid);

/// Writes runs/NAME/stack.RANK.txt: the kernel's state of each thread, which is always available, and then the stacks
/// of the threads, printed by eu-stack (elfutils).
///
/// eu-stack belongs to the project that maintains the ELF and DWARF libraries, is small (gdb takes 20 times its memory
/// and some seconds for libtorch), and needs nothing inside the process, so it also works if every thread is stuck. gdb
/// is used if eu-stack is not installed.
class StackDump {
 public:
  /// Creates `directory` and the file, and starts the tool as a child of this process. Does not wait for it. The file
  /// contains the reason if there is no tool. Throws SystemError if the file cannot be created or the tool cannot be
  /// started.
  StackDump(int rank, pid_t pid, const std::string& directory);
  StackDump(StackDump&&) = default;
  StackDump& operator=(StackDump&&) = default;

  /// The pid of the tool, which the owner must reap; -1 if there is none.
  pid_t tool() const { return tool_; }
  /// Kills the tool.
  void give_up();

 private:
  base::Fd file_;
  pid_t tool_ = -1;
};

/// Returns "stack.RANK.txt".
std::string stack_file_name(int rank);

/// Returns the command line of the first installed tool, for `pid`; empty if none is installed.
std::vector<std::string> stack_command(pid_t pid, std::string_view search_path);

}  // namespace lockstep::launcher
