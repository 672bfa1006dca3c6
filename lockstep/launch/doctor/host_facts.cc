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
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/doctor/python_facts.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::launcher::doctor {
namespace {

using namespace std::chrono_literals;

/// Returns the number in a line of /proc/meminfo: 16 for "MemTotal:  16 kB". Returns 0 if there is no such line.
std::uint64_t meminfo(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::uint64_t value = 0;
    if (word == name + ":" && file >> value) return value;
  }
  return 0;
}

/// Returns the word in brackets: "madvise" for "always [madvise] never".
std::string transparent_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  for (std::string word; file >> word;)
    if (word.size() > 2 && word.front() == '[') return word.substr(1, word.size() - 2);
  return "";
}

void read_memory(HostFacts& facts) {
  facts.memory_bytes = meminfo("MemTotal") * 1024;
  const base::HostMemory memory = base::HostMemory::now();
  facts.available_bytes = memory.available_bytes;
  facts.memory_cgroup = memory.cgroup;
  facts.huge_pages = meminfo("HugePages_Total");
  facts.huge_pages_free = meminfo("HugePages_Free");
  facts.huge_page_bytes = meminfo("Hugepagesize") * 1024;
  facts.transparent_huge_pages = transparent_huge_pages();
  struct statvfs shm{};
  if (::statvfs("/dev/shm", &shm) != 0) return;
  facts.shm_bytes = static_cast<std::uint64_t>(shm.f_blocks) * shm.f_frsize;
  facts.shm_free_bytes = static_cast<std::uint64_t>(shm.f_bavail) * shm.f_frsize;
}

void read_limits(HostFacts& facts) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0)
    facts.memlock_bytes = limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    facts.files_soft = limit.rlim_cur;
    facts.files_hard = limit.rlim_max;
  }
}

/// Measures HostFacts::copy_bytes_per_s.
double copy_speed() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto begun = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), kBytes);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    from[static_cast<std::size_t>(to[kBytes - 1])] = to[0];  // keeps the compiler from removing the copy
    best = std::max(best, static_cast<double>(kBytes) / took.count());
  }
  return best;
}

/// Adds the variable that makes the loader list the libraries instead of starting the program.
process::Environment with_loader_trace(process::Environment environment) {
  environment.push_back("LD_TRACE_LOADED_OBJECTS=1");
  return environment;
}

/// Returns the path of the program `name` in the directory of `path`; empty if it does not exist.
std::string sibling_program(const std::string& path, const std::string& name) {
  const std::string other = path.substr(0, path.rfind('/') + 1) + name;
  return !path.empty() && process::is_executable(other) ? other : "";
}

std::vector<std::string> python_command(const ProgramFile& program) {
  std::vector<std::string> command = {program.python, "-c", kPythonFacts};
  if (program.path != program.python && program.error.empty()) command.push_back(program.path);
  return command;
}

std::string find_host_tool(const std::string& name) { return process::find_tool(name, process::current_environment()); }

void run_host_tools(HostFacts& facts, const HostFactsRequest& request, const process::Environment& environment,
                    int quit) {
  const ProgramFile& program = facts.program;
  const process::Environment own = process::current_environment();
  const bool has_loader = program.error.empty() && !program.loader.empty();
  const std::vector<std::pair<process::ToolResult*, process::ToolCommand>> tools = {
      {&facts.libraries,
       {has_loader ? program.loader : "",
        {program.loader, program.path},
        with_loader_trace(environment),
        request.directory,
        20s}},
      {&facts.python,
       {program.python, python_command(program), environment, request.directory, base::kHostToolTimeout}},
      {&facts.probe,
       {sibling_program(process::executable_path(), "lockstep-probe"),
        {"lockstep-probe"},
        environment,
        "",
        base::kHostToolTimeout}},
      {&facts.nvidia_smi,
       {find_host_tool("nvidia-smi"),
        {"nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"},
        own,
        "",
        30s}},
      {&facts.resolved, {find_host_tool("getent"), {"getent", "ahosts", base::net::host_name()}, own, "", 10s}},
      {&facts.mpirun, {sibling_program(facts.orted, "mpirun"), {"mpirun", "--version"}, own, "", 10s}},
  };
  std::vector<process::ToolCommand> calls;
  for (const auto& [result, call] : tools) calls.push_back(call);
  std::vector<process::ToolResult> results = process::run_tools(calls, quit);
  for (std::size_t i = 0; i < tools.size(); ++i) *tools[i].first = std::move(results[i]);
}

}  // namespace

HostFacts collect_host_facts(const HostFactsRequest& request, int quit) {
  HostFacts facts;
  const process::Environment environment =
      request.extends_own_environment ? process::merge_environment(process::current_environment(), request.environment)
                                      : request.environment;
  std::error_code error;
  facts.cpus_online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.infiniband = !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
  facts.addresses = base::net::interface_addresses();
  read_memory(facts);
  read_limits(facts);
  facts.copy_bytes_per_s = copy_speed();
  facts.program = inspect_program(request.command, request.directory, environment);
  if (request.mpi) facts.orted = find_host_tool("orted");
  run_host_tools(facts, request, environment, quit);
  return facts;
}

}  // namespace lockstep::launcher::doctor
