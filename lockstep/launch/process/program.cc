#include "lockstep/launch/process/program.h"

#include <elf.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::launcher::process {
namespace {

void check_executable(const std::string& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0)
    throw base::UsageError("program " + base::quoted(path, 256) + ": " + std::strerror(errno) +
                           "; expected an executable file");
  if (!S_ISREG(info.st_mode))
    throw base::UsageError("program " + base::quoted(path, 256) + ": not a file; expected an executable file");
  if (::access(path.c_str(), X_OK) != 0)
    throw base::UsageError(
        "program " + base::quoted(path, 256) + ": not executable; expected an executable file",
        path.size() > 3 && path.substr(path.size() - 3) == ".py" ? "python3 " + path : "chmod +x " + path);
}

constexpr std::size_t kHeadBytes = 256;  // of the file; the kernel reads as many (BINPRM_BUF_SIZE)

std::string machine_name(unsigned machine) {
  switch (machine) {
    case EM_X86_64: return "x86_64";
    case EM_AARCH64: return "aarch64";
    case EM_386: return "i386";
    case EM_ARM: return "arm";
    case EM_PPC64: return "ppc64";
    case EM_RISCV: return "riscv";
    default: return "machine " + std::to_string(machine);
  }
}

/// Returns the machine of an ELF file; nullopt for any other file.
std::optional<unsigned> elf_machine(const std::string& head) {
  constexpr std::size_t kOffset = offsetof(Elf64_Ehdr, e_machine);
  if (head.size() < kOffset + 2 || !head.starts_with(std::string_view(ELFMAG, SELFMAG))) return std::nullopt;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(head[i])); };
  return head[EI_DATA] == ELFDATA2MSB ? byte(kOffset) << 8 | byte(kOffset + 1) : byte(kOffset) | byte(kOffset + 1) << 8;
}

/// Returns whether interpreters for further formats are registered, such as qemu for programs of other machines.
bool has_further_formats() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/sys/fs/binfmt_misc", error))
    if (entry.path().filename() != "register" && entry.path().filename() != "status") return true;
  return false;
}

}  // namespace

bool is_executable(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
}

std::string read_head(const std::string& path, std::size_t most) {
  const base::Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::string head(most, '\0');
  const ssize_t size = file ? ::read(file.get(), head.data(), head.size()) : 0;
  head.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  return head;
}

std::string find_program(const std::string& name, std::string_view search_path) {
  if (name.find('/') != std::string::npos) {
    check_executable(name);
    return name;
  }
  for (const std::string& folder : base::split(search_path, ':')) {
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (is_executable(path)) return path;
  }
  throw base::UsageError("program " + base::quoted(name, 256) + ": not found in PATH; expected an executable file",
                         is_executable("./" + name) ? "./" + name : "");
}

void check_startable(const std::string& path) {
  check_executable(path);
  const std::string head = read_head(path, kHeadBytes), subject = "program " + base::quoted(path, 256) + ": ";
  if (!head.starts_with("#!") && has_further_formats()) return;
  if (const auto machine = elf_machine(head)) {
    const auto own = elf_machine(read_head("/proc/self/exe", kHeadBytes));
    if (own && *machine != *own && !(*own == EM_X86_64 && *machine == EM_386))
      throw base::UsageError(subject + "it is built for " + machine_name(*machine) + ", and this host is " +
                             machine_name(*own) + "; expected a program for this host");
    return;
  }
  const auto is_text = [](char c) {
    return static_cast<unsigned char>(c) >= ' ' || c == '\n' || c == '\t' || c == '\r';
  };
  if (!head.starts_with("#!")) {
    if (!head.empty() && std::ranges::all_of(head, is_text))
      throw base::UsageError(subject + "cannot be executed: " + std::strerror(ENOEXEC),
                             "start the script with a line such as #!/bin/sh");
    return;
  }
  const std::vector<std::string> words = shebang_words(head);
  if (!words.empty() && words[0].starts_with('/') && !is_executable(words[0]))
    throw base::UsageError(subject + "its first line names the interpreter " + base::quoted(words[0], 256) +
                           ", which is not an executable file on this host");
}

std::vector<std::string> shebang_words(const std::string& head) {
  if (!head.starts_with("#!")) return {};
  std::istringstream line(head.substr(2, head.find('\n') - 2));
  std::vector<std::string> words;
  for (std::string word; line >> word;) words.push_back(word);
  return words;
}

std::string executable_path() {
  char path[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  if (size < 0) throw base::SystemError("cannot read /proc/self/exe", errno);
  return std::string(path, static_cast<std::size_t>(size));
}

std::string first_match(const std::string& folder, const std::string& pattern) {
  std::string literal;
  for (const char c : folder) {
    if (std::string_view("*?[\\").find(c) != std::string_view::npos) literal += '\\';
    literal += c;
  }
  ::glob_t found = {};
  const std::string first = ::glob((literal + pattern).c_str(), 0, nullptr, &found) == 0 ? found.gl_pathv[0] : "";
  ::globfree(&found);
  return first;
}

std::string cmake_package_folder(const std::string& program) {
  const std::string prefix = program.substr(0, program.rfind('/')) + "/..";
  for (const char* const place :
       {"/lib*/cmake/Lockstep", "/lib/*/cmake/Lockstep", "/lib/python3*/*-packages/lockstep/sdk/lib/cmake/Lockstep"}) {
    const std::string first = first_match(prefix, std::string(place) + "/LockstepConfig.cmake");
    if (!first.empty()) return std::filesystem::canonical(first).parent_path();
  }
  throw base::UsageError("there is no CMake package beside " + base::quoted(program, 256),
                         "pip install lockstep-ddp-sdk, or cmake --install");
}

void exec_companion(const std::string& name, const std::vector<std::string>& arguments) {
  const std::string own = executable_path();
  const std::string path = own.substr(0, own.rfind('/') + 1) + name;
  if (!is_executable(path))
    throw base::UsageError(
        "program " + base::quoted(path, 256) +
            ": not found; expected in the directory of the program lockstep, with which it is installed",
        "with pip: pip install lockstep-ddp-sdk");
  std::vector<std::string> argv = {name};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  throw base::SystemError("cannot execute " + base::quoted(path, 256), exec_program(path, argv));
}

}  // namespace lockstep::launcher::process
