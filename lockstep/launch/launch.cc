#include "lockstep/launch/launch.h"

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"
#include "lockstep/launch/slurm/step_task.h"

namespace lockstep::launcher {
namespace {

std::string find_launcher(const base::Env& env, const std::string& self) {
  if (env.lockstep_program) {
    if (process::is_executable(*env.lockstep_program)) return *env.lockstep_program;
    throw base::UsageError("LOCKSTEP_PROGRAM is " + base::quoted(*env.lockstep_program, 256) +
                           "; expected the path of the program lockstep");
  }
  const std::string beside = self.substr(0, self.rfind('/') + 1) + "lockstep";
  if (process::is_executable(beside)) return beside;
  try {
    return process::find_program("lockstep", env.path.value_or(""));
  } catch (const base::UsageError&) {
    throw base::UsageError("launch: the program lockstep was not found; expected it at " + base::quoted(beside, 256) +
                               " or in PATH " + base::quoted(env.path.value_or(""), 512),
                           "set LOCKSTEP_PROGRAM to its path");
  }
}

std::vector<std::string> local_arguments(int ranks) {
  return ranks > 0 ? std::vector<std::string>{"run", "-n", std::to_string(ranks)} : std::vector<std::string>{"run"};
}

}  // namespace

void launch(const LaunchOptions& options, int argc, char** argv) {
  const base::Env& env = base::Env::this_process();
  constexpr int kMaxRanks = 4096;
  if (options.nodes < 1 || options.ranks < 0 || options.ranks > kMaxRanks / options.nodes)
    throw base::UsageError(std::string("launch: ") +
                           (options.nodes == 1 ? "" : "nodes is " + std::to_string(options.nodes) + ", ") +
                           "ranks is " + std::to_string(options.ranks) +
                           "; expected an integer from 0 to 4096, also multiplied by a positive number of nodes");
  const std::string_view source = job::identity::identity_source(env);
  const auto task = source == "slurm" ? slurm::task_arguments(options.ranks, env) : std::nullopt;
  if (!source.empty() && !task) return;
  const std::string self = process::executable_path();
  const std::string launcher = find_launcher(env, self);
  std::vector<std::string> arguments = task ? *task : local_arguments(options.nodes * options.ranks);
  arguments.insert(arguments.begin(), "lockstep");
  if (arguments[1] == "run") {
    arguments.insert(arguments.end(), options.options.begin(), options.options.end());
    arguments.insert(arguments.end(), {"--", self});
    arguments.insert(arguments.end(), argv + 1, argv + argc);
  }
  throw base::SystemError("launch: cannot execute " + base::quoted(launcher, 256),
                          process::exec_program(launcher, arguments));
}

}  // namespace lockstep::launcher
