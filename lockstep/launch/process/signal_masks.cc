#include "lockstep/launch/process/signal_masks.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

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

/// fork(), vfork() and posix_spawn() block all signals for the moment in which they make a process.
bool keeps_blocked(pid_t pid, int signal) {
  constexpr int kLooks = 5;
  for (int look = 0; look < kLooks; ++look) {
    if (look != 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!is_in_mask(pid, "SigBlk", signal)) return false;
  }
  return true;
}

}  // namespace

bool catches_signal(pid_t pid, int signal) { return is_in_mask(pid, "SigCgt", signal); }

bool expects_signal(pid_t pid, int signal) { return catches_signal(pid, signal) || keeps_blocked(pid, signal); }

void signal_first_expecting(const std::vector<pid_t>& pids, int signal) {
  const auto found = std::find_if(pids.begin(), pids.end(), [&](pid_t pid) { return expects_signal(pid, signal); });
  if (found != pids.end()) ::kill(*found, signal);
}

}  // namespace lockstep::launcher::process
