#include "lockstep/launch/agent/rank_environment.h"

#include <glob.h>

#include "lockstep/base/error.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::launcher::agent {
namespace {

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

/// Returns the first file that matches; empty if there is none.
std::string first_match(const std::string& pattern) {
  ::glob_t found = {};
  const std::string first = ::glob(pattern.c_str(), 0, nullptr, &found) == 0 ? found.gl_pathv[0] : "";
  ::globfree(&found);
  return first;
}

/// Returns the folder with the hook's sitecustomize.py, which is installed with this program; empty if it is not.
std::string hook_folder() {
  try {
    const std::string prefix = folder_of(folder_of(process::executable_path()));
    for (const char* const place : {"/lib/lockstep", "/lib/python3*/*-packages"})
      if (const std::string file = first_match(prefix + place + "/_lockstep_hook/path/sitecustomize.py"); !file.empty())
        return folder_of(file);
  } catch (const base::Error&) {
    // without the hook
  }
  return "";
}

/// Whether `program`, an interpreter or a script beside one, is in an environment in which the package is installed.
bool has_installed_hook(const std::string& program) {
  return !first_match(folder_of(folder_of(program)) + "/lib/python3*/*-packages/lockstep_hook.pth").empty();
}

}  // namespace

std::vector<std::string> rank_argv(const plan::JobPlan& job, const plan::RankPlan& plan) {
  std::vector<std::string> all = job.arguments;
  all.insert(all.end(), plan.arguments.begin(), plan.arguments.end());
  return all;
}

process::Environment rank_environment(const plan::JobPlan& job, const plan::RankPlan& plan, int page,
                                      const std::string& error_file) {
  process::Environment all = job.environment;
  all.insert(all.end(), plan.environment.begin(), plan.environment.end());
  all.push_back("LOCKSTEP_PAGE=" + std::to_string(page));
  all.push_back("TORCHELASTIC_ERROR_FILE=" + error_file);
  return all;
}

void add_python_hook(plan::JobPlan& job) {
  if (process::find_variable(job.environment, "LOCKSTEP_WATCH") == "off" || has_installed_hook(job.program)) return;
  const std::string folder = hook_folder();
  if (folder.empty()) return;
  const auto outer = process::find_variable(job.environment, "PYTHONPATH");
  std::string value = "PYTHONPATH=" + folder + (outer && !outer->empty() ? ":" + std::string(*outer) : "");
  std::erase_if(job.environment, [](const std::string& one) { return process::variable_name(one) == "PYTHONPATH"; });
  job.environment.push_back(std::move(value));
}

}  // namespace lockstep::launcher::agent
