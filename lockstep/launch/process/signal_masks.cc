#include "lockstep/launch/process/signal_masks.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <set>
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

/// Returns those of the processes that keep the signal blocked for 0.2 s. fork(), vfork() and posix_spawn() block all
/// signals for the moment in which they make a process.
std::set<pid_t> keep_blocked(const std::vector<std::vector<pid_t>>& trees, int signal) {
  constexpr int kLooks = 11;
  std::set<pid_t> blocked;
  for (const std::vector<pid_t>& tree : trees) blocked.insert(tree.begin(), tree.end());
  for (int look = 0; look < kLooks && !blocked.empty(); ++look) {
    if (look != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::erase_if(blocked, [&](pid_t pid) { return !is_in_mask(pid, "SigBlk", signal); });
  }
  return blocked;
}

}  // namespace

bool catches_signal(pid_t pid, int signal) { return is_in_mask(pid, "SigCgt", signal); }

void signal_first_expecting(const std::vector<std::vector<pid_t>>& trees, int signal) {
  const std::set<pid_t> blocked = keep_blocked(trees, signal);
  for (const std::vector<pid_t>& tree : trees) {
    const auto expects = [&](pid_t pid) { return catches_signal(pid, signal) || blocked.contains(pid); };
    if (const auto found = std::find_if(tree.begin(), tree.end(), expects); found != tree.end()) ::kill(*found, signal);
  }
}

}  // namespace lockstep::launcher::process
