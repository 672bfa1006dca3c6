#include "lockstep/launch/process/stack_dump.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/proc_stat.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::launcher::process {
namespace {

constexpr int kMaxThreads = 1000;

char state_in(const std::filesystem::path& stat) {
  return base::read_proc_stat(stat.string()).value_or(base::ProcStat()).state;
}

std::string kernel_report(int rank, pid_t pid) {
  const std::filesystem::path process = "/proc/" + std::to_string(pid);
  std::string text = "rank " + std::to_string(rank) + ", process " + std::to_string(pid) + ", state " +
                     state_in(process / "stat") + "\n";
  std::error_code error;
  int count = 0;
  for (const auto& thread : std::filesystem::directory_iterator(process / "task", error)) {
    if (++count > kMaxThreads) break;
    const std::string where = read_file(thread.path() / "wchan");
    text += "thread " + thread.path().filename().string() + " (" + read_file(thread.path() / "comm") + "): state " +
            state_in(thread.path() / "stat") +
            (where.empty() || where == "0" ? "" : ", in the kernel function " + where) + "\n";
  }
  return text + "\n";
}

}  // namespace

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  std::string all = text.str();
  while (!all.empty() && all.back() == '\n') all.pop_back();
  return all;
}

bool is_dumping_core(pid_t pid) {
  return read_file("/proc/" + std::to_string(pid) + "/status").find("\nCoreDumping:\t1") != std::string::npos;
}

std::string stack_file_name(int rank) { return "stack." + std::to_string(rank) + ".txt"; }

std::vector<std::string> stack_command(pid_t pid, std::string_view search_path) {
  const std::string number = std::to_string(pid);
  const std::vector<std::vector<std::string>> tools = {
      {"eu-stack", "--pid=" + number},
      {"gdb", "-nx", "-batch", "-p", number, "-ex", "set pagination off", "-ex", "thread apply all bt"},
  };
  for (std::vector<std::string> command : tools) {
    try {
      command[0] = find_program(command[0], search_path);
      return command;
    } catch (const base::UsageError&) {
      // Try the next tool.
    }
  }
  return {};
}

StackDump::StackDump(int rank, pid_t pid, const std::string& directory, const std::string& python) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  const std::string path = directory + "/" + stack_file_name(rank);
  file_ = base::Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file_) throw base::SystemError("cannot write " + path, errno);
  base::write_all(file_.get(), python + kernel_report(rank, pid));
  const auto command = stack_command(pid, kDefaultSearchPath);
  if (command.empty()) {
    base::write_all(file_.get(), "no stacks: neither eu-stack (elfutils) nor gdb is installed; install one of them\n");
    return;
  }
  const base::Fd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  tool_ = spawn({.path = command[0],
                 .argv = command,
                 .environment = {std::string("PATH=") + kDefaultSearchPath, "LC_ALL=C"},
                 .in = no_input.get(),
                 .out = file_.get(),
                 .err = file_.get()});
}

void StackDump::give_up() {
  if (tool_ > 0) ::kill(tool_, SIGKILL);
  tool_ = -1;
}

}  // namespace lockstep::launcher::process
