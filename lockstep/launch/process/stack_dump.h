// Where the threads of a process are that does not get on.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher {

/// The state of a process as /proc shows it: R, S, D, T ...; '?' when it is not there.
char process_state(pid_t pid);
/// True while the kernel writes its memory to a file, because it has died.
bool is_dumping_core(pid_t pid);

/// Writes runs/NAME/stack.RANK.txt: what the kernel says of each thread, which always works, and the threads' stacks as
/// eu-stack (elfutils) prints them. Why that: it is kept by those who keep the ELF and DWARF libraries, small (gdb
/// takes 20 times its memory and some seconds for libtorch), needs nothing inside the process, and so works for one
/// whose every thread is stuck. gdb is asked where there is no eu-stack.
class StackDump {
 public:
  /// Starts; the tool is a child of this process. `path` and its folder are made. Where something cannot be done the
  /// file says so, if it can be made at all. Throws SystemError or UsageError when it cannot.
  StackDump(int rank, pid_t pid, const std::string& folder);
  StackDump(StackDump&&) = default;
  StackDump& operator=(StackDump&&) = default;

  /// The child; -1 when there is none to wait for.
  pid_t tool() const { return tool_; }
  /// Gives up waiting for it.
  void give_up();

 private:
  base::Fd file_;
  pid_t tool_ = -1;
};

/// The file's name.
std::string stack_file_name(int rank);

/// What to start: the first of these that is there, and its arguments for `pid`. Empty when there is none.
std::vector<std::string> stack_command(pid_t pid, std::string_view search_path);

}  // namespace lockstep::launcher
