#include "lockstep/launch/agent/rank_environment.h"

#include "lockstep/base/parse.h"
#include "lockstep/launch/process/python_program.h"

namespace lockstep::launcher::agent {

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

void use_staged_files(plan::JobPlan& job, const cli::AgentOptions& staged) {
  if (!staged.staged_program.empty()) job.program = staged.staged_program;
  const auto script = process::python_script_index(job.arguments);
  if (staged.staged_script.empty() || !script) return;
  std::string& word = job.arguments[*script];
  word = staged.staged_script + "/" + word.substr(word.rfind('/') + 1);
  if (*script == 0) job.program = word;
}

std::string add_python_hook(plan::JobPlan& job, const std::string& staged_hook) {
  if (process::find_variable(job.environment, "LOCKSTEP_WATCH") == "off" || process::has_installed_hook(job.program))
    return "";
  std::string folder = staged_hook.empty() ? process::python_hook_folder() : staged_hook + "/" + process::kPythonHook;
  if (folder.empty()) return "";
  folder += "/path";  // has sitecustomize.py
  if (folder.find(':') != std::string::npos)
    return "Python programs are not watched, because the folder of Lockstep has a colon in its path: " +
           base::quoted(folder, 256);
  const auto outer = process::find_variable(job.environment, "PYTHONPATH");
  std::string value = "PYTHONPATH=" + folder + (outer && !outer->empty() ? ":" + std::string(*outer) : "");
  std::erase_if(job.environment, [](const std::string& one) { return process::variable_name(one) == "PYTHONPATH"; });
  job.environment.push_back(std::move(value));
  return "";
}

}  // namespace lockstep::launcher::agent
