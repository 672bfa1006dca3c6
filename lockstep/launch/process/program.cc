#include "lockstep/launch/process/program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include "lockstep/base/error.h"
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

}  // namespace

bool is_executable(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
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

std::string executable_path() {
  char path[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  if (size < 0) throw base::SystemError("cannot read /proc/self/exe", errno);
  return std::string(path, static_cast<std::size_t>(size));
}

void exec_companion(const std::string& name, const std::vector<std::string>& arguments) {
  const std::string own = executable_path();
  const std::string path = own.substr(0, own.rfind('/') + 1) + name;
  if (!is_executable(path))
    throw base::UsageError(
        "program " + base::quoted(path, 256) +
        ": not found; expected in the directory of the program lockstep, with which it is installed");
  std::vector<std::string> argv = {name};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  throw base::SystemError("cannot execute " + base::quoted(path, 256), exec_program(path, argv));
}

}  // namespace lockstep::launcher::process
