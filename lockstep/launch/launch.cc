#include "lockstep/launch/launch.h"

#include <unistd.h>

#include <cerrno>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/program.h"

namespace lockstep::launcher {
namespace {

bool is_rank(const base::Env& env) {
  return env.lockstep_rank || env.torchelastic_run_id || (env.rank && env.world_size);
}

std::string find_launcher(const base::Env& env, const std::string& self) {
  if (env.lockstep_program) {
    if (is_executable(*env.lockstep_program)) return *env.lockstep_program;
    throw base::UsageError("LOCKSTEP_PROGRAM is " + base::quoted(*env.lockstep_program, 256) +
                           "; allowed is the path of the program lockstep");
  }
  const std::string beside = self.substr(0, self.rfind('/') + 1) + "lockstep";
  if (is_executable(beside)) return beside;
  try {
    return find_program("lockstep", env.path.value_or(""));
  } catch (const base::UsageError&) {
    throw base::UsageError("launch: the program lockstep was not found; looked at " + base::quoted(beside, 256) +
                               " and in PATH " + base::quoted(env.path.value_or(""), 512),
                           "name it with LOCKSTEP_PROGRAM");
  }
}

}  // namespace

void launch(const LaunchOptions& options, int argc, char** argv) {
  const base::Env& env = base::Env::process();
  if (is_rank(env)) return;
  if (options.ranks < 0 || options.ranks > 4096)
    throw base::UsageError("launch: ranks is " + std::to_string(options.ranks) + "; allowed is an integer from 0 to 4096");
  const std::string self = own_path();
  const std::string launcher = find_launcher(env, self);
  std::vector<std::string> words = {"lockstep", "run"};
  if (options.ranks > 0) words.insert(words.end(), {"-n", std::to_string(options.ranks)});
  words.insert(words.end(), options.options.begin(), options.options.end());
  words.insert(words.end(), {"--", self});
  for (int i = 1; i < argc; ++i) words.emplace_back(argv[i]);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(launcher.c_str(), pointers.data());
  throw base::SystemError("launch: cannot execute " + base::quoted(launcher, 256), errno);
}

}  // namespace lockstep::launcher
