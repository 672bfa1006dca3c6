#include "bench/harness/baselines.h"

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "bench/harness/benchmark_job.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::bench {
namespace {

using namespace std::chrono_literals;
using base::Deadline;
using launcher::process::is_executable;

std::string file_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns whether the program exits with 0 within a minute. Blocks until it exits.
bool succeeds(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env = {},
              const std::string& output = "") {
  const pid_t pid = start_process(argv, env, output);
  int status = 0;
  if (!wait_for(pid, Deadline::in(60s), &status)) {
    ::kill(pid, SIGKILL);
    wait_for(pid, Deadline::in(5s), &status);
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string find_in_path(const std::string& name) {
  try {
    return launcher::process::find_program(name, base::Env::this_process().path.value_or(""));
  } catch (const base::UsageError&) {
    return "";
  }
}

}  // namespace

std::string baselines_folder() {
  const std::string own = launcher::process::executable_path();
  const std::string installed = own.substr(0, own.rfind('/')) + "/../share/lockstep/bench/baselines";
  return ::access(installed.c_str(), R_OK) == 0 ? installed : std::string(LOCKSTEP_SOURCE_DIR) + "/bench/baselines";
}

std::optional<std::string> find_python(const std::string& given) {
  const auto has_torch = [](const std::string& python) {
    // Without the current folder, whose torch.py would run.
    return succeeds({python, "-c", "import sys\nif not sys.path[0]: del sys.path[0]\nimport torch.distributed"});
  };
  if (!given.empty()) {
    const std::string python = launcher::process::find_program(given, base::Env::this_process().path.value_or(""));
    if (has_torch(python)) return python;
    throw base::UsageError("--python is " + base::quoted(given, 256) +
                           ", which cannot import torch; expected a Python interpreter with torch");
  }
  for (const std::string& python :
       {std::string(LOCKSTEP_SOURCE_DIR) + "/.deps/python/bin/python", find_in_path("python3")})
    if (!python.empty() && is_executable(python) && has_torch(python)) return python;
  return std::nullopt;
}

std::string mpi_name(const std::string& version_text) {
  std::smatch found;
  if (std::regex_search(version_text, found, std::regex(R"(Open MPI\D* v?(\d+\.\d+\.\d+))")))
    return "openmpi-" + found[1].str();
  if (std::regex_search(version_text, found, std::regex(R"(Intel\(R\) MPI Library[^\n]*Version (\d+\.\d+))")))
    return "intel-mpi-" + found[1].str();
  if (std::regex_search(version_text, found, std::regex(R"(HYDRA[^\n]*\n\s*Version:\s*(\d+\.\d+(\.\d+)?))")))
    return "mpich-" + found[1].str();
  return "";
}

std::optional<Mpi> find_mpi(const std::string& prefix, const std::string& folder) {
  const std::string root = prefix.empty() ? "" : std::filesystem::absolute(prefix).string();
  const std::string mpicc = root.empty() ? find_in_path("mpicc") : root + "/bin/mpicc";
  const std::string mpirun = root.empty() ? find_in_path("mpirun") : root + "/bin/mpirun";
  if (root.empty() && (mpicc.empty() || mpirun.empty())) return std::nullopt;
  if (!is_executable(mpicc) || !is_executable(mpirun))
    throw base::UsageError("--mpi is " + base::quoted(prefix, 256) +
                           "; expected a directory with bin/mpicc and bin/mpirun");
  Mpi mpi{"", mpirun, {}, ""};
  if (!root.empty())  // the scripts of Intel MPI use these variables to find each other
    mpi.env = {{"PATH", root + "/bin:" + base::Env::this_process().path.value_or("/usr/bin:/bin")},
               {"I_MPI_ROOT", root}};
  const std::string log = folder + "/mpi-version.log";
  ::unlink(log.c_str());
  succeeds({mpirun, "--version"}, mpi.env, log);
  mpi.name = mpi_name(file_text(log));
  if (mpi.name.empty())
    throw base::UsageError(mpirun + " --version printed " + base::quoted(file_text(log), 80) +
                           "; expected Open MPI, MPICH or Intel MPI");
  mpi.program = folder + "/" + mpi.name + ".program";
  const std::string compile_log = mpi.program + ".log";
  if (!succeeds({mpicc, "-O2", "-o", mpi.program, baselines_folder() + "/mpi_all_reduce.c"}, mpi.env, compile_log))
    throw base::UsageError(mpicc + " cannot compile " + baselines_folder() +
                           "/mpi_all_reduce.c: " + base::quoted(file_text(compile_log), 512));
  return mpi;
}

bool is_open_mpi(const Mpi& mpi) { return mpi.name.rfind("openmpi", 0) == 0; }

std::vector<std::string> mpirun_arguments(const Mpi& mpi, int ranks) {
  std::vector<std::string> words = {mpi.mpirun, "-n", std::to_string(ranks)};
  if (is_open_mpi(mpi)) {
    if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
    if (ranks > ::sysconf(_SC_NPROCESSORS_ONLN)) words.emplace_back("--oversubscribe");
  }
  return words;
}

}  // namespace lockstep::bench
