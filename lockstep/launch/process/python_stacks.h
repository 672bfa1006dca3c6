// The stacks of Python programs, which the interpreter itself writes when it is asked by a signal.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launcher::process {

/// The Python hook (python/hook) registers faulthandler for this real-time signal, with a file in memory of this name.
/// The handler needs no lock of the interpreter, so it works while a thread holds that.
inline constexpr int kPythonStackSignal = 50;
inline constexpr std::string_view kPythonStackFile = "lockstep-python-stacks";

/// Returns the Python stacks of all threads of `pids`, newest call first, with a line that names each process; empty if
/// none of them has the handler. Blocks until they have written them, at most until `deadline`. Sends no signal to a
/// process that would not handle it.
std::string read_python_stacks(const std::vector<pid_t>& pids, base::Deadline deadline);

/// Returns where the first process in `stacks` is: "/home/me/train.py:42 in main", the newest call in its main thread
/// that is in no installed package; if all are in packages, the newest. Appends "; its process 4712 (pt_data_worker) is
/// at ..." for the first other process that is in no package, or that hangs in os.fork(). Empty if there is none. Pure.
std::string python_location(std::string_view stacks);

}  // namespace lockstep::launcher::process
