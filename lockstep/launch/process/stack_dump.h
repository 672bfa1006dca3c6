// Writes the stacks of the threads of a process that makes no progress.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/fd.h"

namespace lockstep::launcher::process {

/// Returns the content of a file, such as one of /proc, without the newlines at its end; "" if it cannot be read.
std::string read_file(const std::string& path);

/// Returns whether the process has died and the kernel is writing its core file.
bool is_dumping_core(pid_t pid);

/// Writes runs/NAME/stack.RANK.txt: first the state of each thread from the kernel, which is always available, then the
/// stacks of the threads, printed by eu-stack (elfutils).
///
/// eu-stack is part of elfutils, the project that maintains the ELF and DWARF libraries. It is small: gdb takes 20
/// times as much memory, and some seconds for libtorch. It needs no code inside the process, so it works even if every
/// thread is stuck. If eu-stack is not installed, gdb is used.
class StackDump {
 public:
  /// Creates `directory` and the file, which begins with the stacks in `python`, and starts the tool as a child of this
  /// process. Does not wait for the tool. If no tool is installed, writes that to the file. Throws SystemError if the
  /// file cannot be created or the tool cannot be started.
  StackDump(int rank, pid_t pid, const std::string& directory, const std::string& python);
  StackDump(StackDump&&) = default;
  StackDump& operator=(StackDump&&) = default;

  /// Returns the pid of the tool, which the caller must reap; -1 if there is none.
  pid_t tool() const { return tool_; }
  /// Kills the tool.
  void give_up();

 private:
  base::Fd file_;
  pid_t tool_ = -1;
};

/// Returns "stack.RANK.txt".
std::string stack_file_name(int rank);

/// Returns the command line of the first tool that is installed in `search_path`, for the process `pid`; empty if there
/// is none.
std::vector<std::string> stack_command(pid_t pid, std::string_view search_path);

}  // namespace lockstep::launcher::process
