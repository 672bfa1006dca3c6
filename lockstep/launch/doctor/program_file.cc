// Inspects the file of a program: whether it can run, its loader, its interpreter and its hash.
#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/python_program.h"

namespace lockstep::launcher::doctor {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

std::string hash_file(const std::string& path) {
  const base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::vector<char> bytes(std::size_t{1} << 20);
  base::ContentHash hash;
  const Deadline deadline = Deadline::in(base::kHashTimeout);
  ssize_t size = fd ? 1 : -1;
  while (size > 0 && !deadline.expired()) {
    size = ::read(fd.get(), bytes.data(), bytes.size());
    if (size > 0) hash.add({bytes.data(), static_cast<std::size_t>(size)});
  }
  return size == 0 ? hash.hex_digest().substr(0, 16) : "";  // 16 digits distinguish the files of all hosts
}

/// Returns the first `most` bytes of a file.
std::string read_head(const std::string& path, std::size_t most) {
  const base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::string bytes(most, '\0');
  const ssize_t size = fd ? ::pread(fd.get(), bytes.data(), bytes.size(), 0) : 0;
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  return bytes;
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
  const std::string head = read_head(file.path, 1 << 16);
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
