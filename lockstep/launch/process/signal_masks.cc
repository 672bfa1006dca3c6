#include "lockstep/launch/process/signal_masks.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
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

bool is_shell(pid_t pid) {
  static constexpr std::array<std::string_view, 10> kShells = {"sh",  "bash", "dash", "ash",  "zsh",
                                                               "ksh", "mksh", "fish", "tcsh", "busybox"};
  std::error_code error;
  const std::string name =
      std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error).filename().string();
  return std::ranges::find(kShells, name) != kShells.end();
}

pid_t parent_in(const std::map<pid_t, ProcessCounters>& processes, pid_t pid) {
  const auto found = processes.find(pid);
  return found == processes.end() ? 0 : found->second.parent;
}

/// Returns the processes from `rank.joined` up to `rank.started`; empty if it is no descendant.
std::vector<pid_t> path_to_joined(const RankPids& rank, const std::map<pid_t, ProcessCounters>& processes) {
  std::vector<pid_t> path;
  // The length is bounded, because pids that are reused while /proc is read could form a cycle.
  for (pid_t pid = rank.joined; pid > 0 && path.size() < processes.size(); pid = parent_in(processes, pid)) {
    path.push_back(pid);
    if (pid == rank.started) return path;
  }
  return {};
}

/// Returns `rank.started`, and what shells below it have started.
std::vector<pid_t> started_by_shells(const RankPids& rank, const std::map<pid_t, ProcessCounters>& processes) {
  std::vector<pid_t> found;
  std::set<pid_t> shells;
  for (const pid_t pid : tree_of(rank.started, processes)) {
    if (pid != rank.started && !shells.contains(parent_in(processes, pid))) continue;
    found.push_back(pid);
    if (is_shell(pid)) shells.insert(pid);
  }
  return found;
}

}  // namespace

bool catches_signal(pid_t pid, int signal) { return is_in_mask(pid, "SigCgt", signal); }

void signal_first_expecting(const std::vector<std::vector<pid_t>>& trees, int signal) {
  const std::set<pid_t> blocked = keep_blocked(trees, signal);
  for (const std::vector<pid_t>& tree : trees) {
    const auto expects = [&](pid_t pid) { return catches_signal(pid, signal) || blocked.contains(pid); };
    if (const auto found = std::ranges::find_if(tree, expects); found != tree.end()) ::kill(*found, signal);
  }
}

std::vector<bool> signal_programs(const std::vector<RankPids>& ranks, const std::map<pid_t, ProcessCounters>& processes,
                                  int signal) {
  std::vector<bool> is_joined, expected;
  std::vector<std::vector<pid_t>> candidates;
  for (const RankPids& rank : ranks) {
    candidates.push_back(path_to_joined(rank, processes));
    is_joined.push_back(!candidates.back().empty());
    if (!is_joined.back()) candidates.back() = started_by_shells(rank, processes);
  }
  const std::set<pid_t> blocked = keep_blocked(candidates, signal);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    std::vector<pid_t> receivers;
    int num_programs = 0, num_expecting = 0;
    for (const pid_t pid : candidates[i]) {
      const bool is_program = is_joined[i] ? pid == ranks[i].joined : !is_shell(pid);
      const bool expects = catches_signal(pid, signal) || blocked.contains(pid);
      num_programs += is_program;
      num_expecting += is_program && expects;
      if (expects) receivers.push_back(pid);
    }
    expected.push_back(num_programs > 0 && num_expecting == num_programs);
    if (expected.back())
      for (const pid_t pid : receivers) ::kill(pid, signal);
  }
  return expected;
}

}  // namespace lockstep::launcher::process
