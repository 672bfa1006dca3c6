#include "lockstep/launch/plan/host_info.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <system_error>
#include <tuple>

#include "lockstep/base/env.h"
#include "lockstep/base/host_memory.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/join.h"

namespace lockstep::launcher::plan {
namespace {

constexpr int kMaxCpus = 8192;  // the largest NR_CPUS of Linux

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int> affinity_mask() {
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(kMaxCpus), [](cpu_set_t* s) { CPU_FREE(s); });
  const std::size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  CPU_ZERO_S(bytes, set.get());
  std::vector<int> cpus;
  if (::sched_getaffinity(0, bytes, set.get()) != 0) return {0};
  for (int cpu = 0; cpu < kMaxCpus; ++cpu)
    if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
  return cpus;
}

std::map<int, int> node_of_cpu() {
  std::map<int, int> nodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename();
    const auto node = name.rfind("node", 0) == 0 ? base::parse_int(name.substr(4)) : std::nullopt;
    if (!node) continue;
    for (const int cpu : parse_cpu_list(first_line(entry.path() / "cpulist"))) nodes[cpu] = static_cast<int>(*node);
  }
  return nodes;
}

int count_gpus() {
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    if (name.rfind("nvidia", 0) == 0 && base::parse_int(std::string_view(name).substr(6))) ++count;
  }
  return count;
}

}  // namespace

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  for (const std::string& range : base::split(text, ',')) {
    const std::size_t dash = range.find('-');
    const auto first = base::parse_int(range.substr(0, dash));
    const auto last = dash == std::string::npos ? first : base::parse_int(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last >= kMaxCpus) continue;
    for (auto cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int>(cpu));
  }
  return cpus;
}

std::vector<Cpu> usable_cpus() {
  const std::map<int, int> nodes = node_of_cpu();
  std::vector<Cpu> cpus;
  for (const int id : affinity_mask()) {
    const std::string directory = "/sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/";
    const std::vector<int> siblings = parse_cpu_list(first_line(directory + "thread_siblings_list"));
    const auto node = nodes.find(id);
    cpus.push_back(
        {id, siblings.empty() ? id : *std::ranges::min_element(siblings), node == nodes.end() ? 0 : node->second});
  }
  return cpus;
}

int num_cores(const std::vector<Cpu>& cpus) {
  std::set<int> cores;
  for (const Cpu& cpu : cpus) cores.insert(cpu.core);
  return static_cast<int>(cores.size());
}

std::vector<std::vector<int>> split_cpus(std::vector<Cpu> cpus, int ranks) {
  std::ranges::sort(
      cpus, [](const Cpu& a, const Cpu& b) { return std::tie(a.node, a.core, a.id) < std::tie(b.node, b.core, b.id); });
  const std::int64_t cores = num_cores(cpus);
  std::vector<std::vector<int>> parts(static_cast<std::size_t>(ranks));
  std::int64_t core = -1;
  int last = -1;
  for (const Cpu& cpu : cpus) {
    if (core < 0 || cpu.core != last) ++core;
    last = cpu.core;
    if (ranks > cores) {
      for (auto& part : parts) part.push_back(cpu.id);
    } else {
      // Rank r gets the cores from r * cores / ranks up to, but not including, (r + 1) * cores / ranks.
      parts[static_cast<std::size_t>(((core + 1) * ranks - 1) / cores)].push_back(cpu.id);
    }
  }
  return parts;
}

int usable_cores(const HostInfo& info) {
  const int cores = num_cores(info.cpus);
  return info.cpu_quota > 0 ? std::min(cores, info.cpu_quota) : cores;
}

HostInfo collect_host_info() {
  const double quota = base::cpu_quota();
  return {.host = base::net::host_name(),
          .version = LOCKSTEP_VERSION,
          .build = job::build_id(""),
          .machine = job::host_id(),
          .cpus = usable_cpus(),
          .cpu_quota = quota < kMaxCpus ? std::max(1, static_cast<int>(quota)) : 0,
          .gpus = count_gpus(),
          .visible_gpus = base::Env::this_process().cuda_visible_devices.value_or("")};
}

}  // namespace lockstep::launcher::plan
