#include "lockstep/launch/doctor/host_facts.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "lockstep/base/host_memory.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

constexpr const char* kAskPython =
    "import sys, json\n"
    "d = {'python': '%d.%d.%d' % sys.version_info[:3]}\n"
    "try:\n"
    "  import torch\n"
    "  d['torch'] = torch.__version__; d['cuda'] = torch.version.cuda\n"
    "  try: d['nccl'] = '.'.join(map(str, torch.cuda.nccl.version()))\n"
    "  except Exception: pass\n"
    "except Exception as e: d['error'] = type(e).__name__ + ': ' + str(e)\n"
    "print(json.dumps(d))\n";

/// "MemTotal:  16 kB" in /proc/meminfo: 16; 0 when there is no such line.
std::uint64_t meminfo(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::uint64_t value = 0;
    if (word == name + ":" && file >> value) return value;
  }
  return 0;
}

/// "always [madvise] never": the word in brackets.
std::string transparent_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  for (std::string word; file >> word;)
    if (word.size() > 2 && word.front() == '[') return word.substr(1, word.size() - 2);
  return "";
}

void look_at_memory(Examination& found) {
  found.memory_bytes = meminfo("MemTotal") * 1024;
  const base::HostMemory memory = base::HostMemory::now();
  found.available_bytes = memory.available_bytes;
  found.limited_by = memory.limited_by;
  found.huge_pages = meminfo("HugePages_Total");
  found.huge_pages_free = meminfo("HugePages_Free");
  found.huge_page_bytes = meminfo("Hugepagesize") * 1024;
  found.transparent_huge_pages = transparent_huge_pages();
  struct statvfs shm{};
  if (::statvfs("/dev/shm", &shm) != 0) return;
  found.shm_bytes = static_cast<std::uint64_t>(shm.f_blocks) * shm.f_frsize;
  found.shm_free_bytes = static_cast<std::uint64_t>(shm.f_bavail) * shm.f_frsize;
}

void look_at_limits(Examination& found) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0)
    found.memlock_bytes = limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    found.files_soft = limit.rlim_cur;
    found.files_hard = limit.rlim_max;
  }
}

/// As in the header: what one core can move.
double copy_speed() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto begun = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), kBytes);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    from[static_cast<std::size_t>(to[kBytes - 1])] = to[0];  // the copy counts for something, so it is made
    best = std::max(best, static_cast<double>(kBytes) / took.count());
  }
  return best;
}

/// The environment of the program, with which the loader only shows what it would load.
Environment traced(Environment environment) {
  environment.push_back("LD_TRACE_LOADED_OBJECTS=1");
  return environment;
}

/// The program `name` in the folder of `path`; empty when there is none.
std::string neighbour(const std::string& path, const std::string& name) {
  const std::string other = path.substr(0, path.rfind('/') + 1) + name;
  return !path.empty() && is_executable(other) ? other : "";
}

std::string host_tool(const std::string& name) { return tool_path(name, own_environment()); }

void ask_tools(Examination& found, const ExamineOrder& order, const Environment& environment, int quit) {
  const ProgramFile& program = found.program;
  const Environment own = own_environment();
  const bool loads = program.error.empty() && !program.loader.empty();
  const std::vector<std::pair<ToolSaid*, ToolCall>> asked = {
      {&found.libraries,
       {loads ? program.loader : "", {program.loader, program.path}, traced(environment), order.directory, 20s}},
      {&found.python, {program.python, {program.python, "-c", kAskPython}, environment, order.directory, 60s}},
      {&found.probe, {neighbour(own_path(), "lockstep-probe"), {"lockstep-probe"}, environment, "", 60s}},
      {&found.smi,
       {host_tool("nvidia-smi"),
        {"nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"},
        own,
        "",
        30s}},
      {&found.resolved, {host_tool("getent"), {"getent", "ahosts", base::host_name()}, own, "", 10s}},
      {&found.mpirun, {neighbour(found.orted, "mpirun"), {"mpirun", "--version"}, own, "", 10s}},
  };
  std::vector<ToolCall> calls;
  for (const auto& [said, call] : asked) calls.push_back(call);
  std::vector<ToolSaid> said = run_tools(calls, quit);
  for (std::size_t i = 0; i < asked.size(); ++i) *asked[i].first = std::move(said[i]);
}

}  // namespace

Examination examine(const ExamineOrder& order, int quit) {
  Examination found;
  const Environment environment = order.add_to_own ? merged(own_environment(), order.environment) : order.environment;
  std::error_code error;
  found.cpus_online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  found.infiniband = !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
  found.addresses = base::interface_addresses();
  look_at_memory(found);
  look_at_limits(found);
  found.copy_bytes_per_s = copy_speed();
  found.program = look_at_program(order.command, order.directory, environment);
  if (order.mpi) found.orted = host_tool("orted");
  ask_tools(found, order, environment, quit);
  return found;
}

}  // namespace lockstep::launcher
