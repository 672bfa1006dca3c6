#include "lockstep/launch/doctor/host_facts.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_memory.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/python_program.h"

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

void run_host_tools(HostFacts& facts, const HostFactsRequest& request, const process::Environment& environment,
                    int quit) {
  const ProgramFile& program = facts.program;
  const std::string loader = program.error.empty() ? program.loader : "";
  const std::string probe = sibling_program(process::executable_path(), "lockstep-probe");
  const std::vector<std::pair<process::ToolResult*, process::ToolCommand>> tools = {
      {&facts.libraries, {loader, {loader, program.path}, with_loader_trace(environment), request.directory, 20s}},
      {&facts.python,
       {program.python, python_command(program), environment, request.directory, base::kHostToolTimeout}},
      {&facts.probe, {probe, {"lockstep-probe"}, environment, "", base::kHostToolTimeout}},
      {&facts.nvidia_smi,
       {.path = process::find_tool("nvidia-smi"),
        .argv = {"nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"},
        .limit = 30s}},
      {&facts.resolved, {process::find_tool("getent"), {"getent", "ahosts", base::net::host_name()}}},
      {&facts.mpirun, {sibling_program(facts.orted, "mpirun"), {"mpirun", "--version"}}},
  };
  std::vector<process::ToolCommand> calls;
  for (const auto& [result, call] : tools) calls.push_back(call);
  std::vector<process::ToolResult> results = process::run_tools(calls, quit);
  for (std::size_t i = 0; i < tools.size(); ++i) *tools[i].first = std::move(results[i]);
}

std::string hash_file(const std::string& path) {
  const base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::vector<char> bytes(std::size_t{1} << 20);
  base::ContentHash hash;
  const auto deadline = base::Deadline::in(base::kHashTimeout);
  ssize_t size = fd ? 1 : -1;
  while (size > 0 && !deadline.expired()) {
    size = ::read(fd.get(), bytes.data(), bytes.size());
    if (size > 0) hash.add({bytes.data(), static_cast<std::size_t>(size)});
  }
  return size == 0 ? hash.hex_digest().substr(0, 16) : "";  // 16 digits distinguish the files of all hosts
}

/// Returns the PT_INTERP of a 64-bit ELF file; empty for a static program and for other files.
std::string elf_loader(const std::string& head) {
  Elf64_Ehdr header;
  if (head.size() < sizeof header) return "";
  std::memcpy(&header, head.data(), sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_phentsize != sizeof(Elf64_Phdr))
    return "";
  for (std::size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    if (header.e_phoff > head.size() || header.e_phoff + (i + 1) * sizeof segment > head.size()) return "";
    std::memcpy(&segment, head.data() + header.e_phoff + i * sizeof segment, sizeof segment);
    if (segment.p_type != PT_INTERP) continue;
    if (segment.p_filesz > PATH_MAX || segment.p_offset > head.size() ||
        segment.p_offset + segment.p_filesz > head.size())
      return "";
    return std::string(head.data() + segment.p_offset, ::strnlen(head.data() + segment.p_offset, segment.p_filesz));
  }
  return "";
}

std::string file_error(const std::string& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) return std::strerror(errno);
  if (!S_ISREG(info.st_mode)) return "not a regular file";
  return "";
}

std::string resolve_below(const std::string& directory, const std::string& path) {
  return directory.empty() || path[0] == '/' ? path : directory + "/" + path;
}

/// Inspects the script of a command that starts a Python interpreter.
void inspect_script(ProgramFile& file, const std::vector<std::string>& command, const std::string& directory) {
  file.python = file.path;
  const auto script = process::python_script_index(command);
  if (!script) return;  // a module or -c
  file.path = resolve_below(directory, command[*script]);
  file.error = file_error(file.path);
  if (file.error.empty() && ::access(file.path.c_str(), R_OK) != 0) file.error = std::strerror(errno);
}

/// Inspects the interpreter in "#!PATH" or "#!/usr/bin/env NAME".
void inspect_interpreter(ProgramFile& file, const std::vector<std::string>& interpreter,
                         const process::Environment& environment) {
  const bool by_env = std::filesystem::path(interpreter[0]).filename() == "env" && interpreter.size() > 1;
  const std::string path = by_env                                   ? process::find_tool(interpreter[1], environment)
                           : process::is_executable(interpreter[0]) ? interpreter[0]
                                                                    : "";
  if (path.empty())
    file.error = "its interpreter " + interpreter[by_env ? 1 : 0] + " does not exist";
  else if (process::is_python(by_env ? interpreter[1] : path))
    file.python = path;
}

}  // namespace

const char* const kPythonFacts = R"PY(
import sys
if sys.path and not sys.path[0]:
    del sys.path[0]  # the current folder, whose json.py or torch.py would run
import ast, json, os

facts = {"python": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix}
active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
if active and os.path.realpath(active) != os.path.realpath(sys.prefix):
    facts["environment"] = active

def imports(node, optional=False):
    """Yields the names of modules that are imported, and whether they may be missing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, optional
        elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
            yield child.module, optional
        else:
            yield from imports(child, optional or isinstance(child, ast.Try))

def imported_packages(script):
    folder = os.path.dirname(os.path.abspath(script))
    sys.path.insert(0, folder)
    names, files = {}, [script]
    for path in files:  # which grows
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read(1 << 20))
        except (OSError, SyntaxError, ValueError):
            continue
        for module, optional in imports(tree):
            place = os.path.join(folder, *module.split("."))
            own = [file for file in (place + ".py", os.path.join(place, "__init__.py")) if os.path.isfile(file)]
            top = module.partition(".")[0]
            if own or os.path.isdir(os.path.join(folder, top)):
                files += [file for file in own if file not in files and len(files) < 500]
            else:
                names[top] = names.get(top, True) and optional
    for name in getattr(sys, "stdlib_module_names", sys.builtin_module_names):
        names.pop(name, None)
    return names

def versions_of(names):
    import importlib.metadata
    import importlib.util

    distributions = getattr(importlib.metadata, "packages_distributions", dict)() if names else {}
    found = {}
    for name, optional in sorted(names.items()):
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            spec = None
        if spec is None or (spec.origin is None and name not in distributions):  # a folder of that name is none
            if not optional:
                found[name] = ""
            continue
        try:
            versions = sorted({importlib.metadata.version(package) for package in distributions.get(name, [name])})
        except Exception:
            versions = []
        found[name] = " ".join(versions) or "?"
    return found

def why_no_cuda(torch):
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES is " + repr(os.environ["CUDA_VISIBLE_DEVICES"])
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).splitlines()[0]
    return "there is no GPU"

try:
    if len(sys.argv) > 1:
        facts["packages"] = versions_of(imported_packages(sys.argv[1]))
except Exception as error:
    facts["packages_error"] = repr(error)
try:
    import torch

    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    facts["no_cuda"] = why_no_cuda(torch)
    try:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        pass
except Exception as error:
    facts["error"] = type(error).__name__ + ": " + str(error)
print(json.dumps(facts))
)PY";

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
  if (request.mpi) facts.orted = process::find_tool("orted");
  run_host_tools(facts, request, environment, quit);
  return facts;
}

ProgramFile inspect_program(const std::vector<std::string>& command, const std::string& directory,
                            const process::Environment& environment) {
  ProgramFile file;
  if (command.empty()) return file;
  const std::string& name = command.front();
  if (!directory.empty() && !std::filesystem::is_directory(directory)) {
    file.path = directory;
    file.error = "no such directory";
    return file;
  }
  file.path =
      name.find('/') == std::string::npos ? process::find_tool(name, environment) : resolve_below(directory, name);
  file.error = file.path.empty() ? "not in PATH" : file_error(file.path);
  if (file.path.empty()) file.path = name;
  if (file.error.empty() && ::access(file.path.c_str(), X_OK) != 0) file.error = "not executable";
  if (!file.error.empty()) return file;
  const std::string head = process::read_head(file.path, 1 << 16);
  if (process::is_python(file.path))
    inspect_script(file, command, directory);
  else if (const auto interpreter = process::shebang_words(head); !interpreter.empty())
    inspect_interpreter(file, interpreter, environment);
  else
    file.loader = elf_loader(head);
  if (!file.loader.empty() && !process::is_executable(file.loader))
    file.error = "its loader " + file.loader + " does not exist";
  if (file.error.empty()) file.hash = hash_file(file.path);
  return file;
}

}  // namespace lockstep::launcher::doctor
