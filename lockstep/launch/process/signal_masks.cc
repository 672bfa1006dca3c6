#include "lockstep/launch/process/signal_masks.h"

#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace lockstep::launcher::process {
namespace {

/// Whether the bit of the signal is set in a mask of /proc/PID/status: `SigCgt:\t0000000000000200`.
bool is_in_mask(pid_t pid, const std::string& name, int signal) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":"))
      return (std::strtoull(line.c_str() + name.size() + 1, nullptr, 16) >> (signal - 1) & 1) != 0;
  return false;
}

}  // namespace

bool catches_signal(pid_t pid, int signal) { return is_in_mask(pid, "SigCgt", signal); }

bool expects_signal(pid_t pid, int signal) { return catches_signal(pid, signal) || is_in_mask(pid, "SigBlk", signal); }

void signal_first_expecting(const std::vector<pid_t>& pids, int signal) {
  const auto found = std::find_if(pids.begin(), pids.end(), [&](pid_t pid) { return expects_signal(pid, signal); });
  if (found != pids.end()) ::kill(*found, signal);
}

}  // namespace lockstep::launcher::process
