#include "lockstep/launch/process/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>

#include "lockstep/base/error.h"

namespace lockstep::launcher::process {

Environment current_environment() {
  Environment all;
  for (char** variable = ::environ; *variable; ++variable) all.emplace_back(*variable);
  return all;
}

std::string current_directory(const std::string& otherwise) {
  std::error_code error;
  const std::filesystem::path directory = std::filesystem::current_path(error);
  if (!error) return directory.string();
  if (otherwise.starts_with('/')) return otherwise;
  throw base::UsageError(
      "the current directory cannot be used: " + error.message() + "; expected a directory that exists",
      "it was probably deleted: change to another one, and back to this one if it exists again");
}

std::string_view variable_name(std::string_view variable) { return variable.substr(0, variable.find('=')); }

std::optional<std::string_view> find_variable(const Environment& environment, std::string_view name) {
  for (const std::string& variable : environment)
    if (variable_name(variable) == name && variable.size() > name.size())
      return std::string_view(variable).substr(name.size() + 1);
  return std::nullopt;
}

Environment merge_environment(const Environment& own, const Environment& added) {
  std::set<std::string_view> replaced;
  for (const std::string& variable : added) replaced.insert(variable_name(variable));
  Environment all;
  for (const std::string& variable : own)
    if (!replaced.contains(variable_name(variable)) && !belongs_to_another_launcher(variable_name(variable)))
      all.push_back(variable);
  all.insert(all.end(), added.begin(), added.end());
  return all;
}

Environment remove_variables(Environment environment, const Environment& others) {
  std::set<std::string_view> names;
  for (const std::string& variable : others) names.insert(variable_name(variable));
  std::erase_if(environment, [&](const std::string& variable) { return names.contains(variable_name(variable)); });
  return environment;
}

bool belongs_to_another_launcher(std::string_view name) {
  constexpr std::array kPrefixes = {"TORCHELASTIC_",    "ROLE_",      "PMI_",        "PMIX_",
                                    "OMPI_COMM_WORLD_", "SLURM_STEP", "SLURM_SRUN_", "SLURM_NTASKS"};
  // Programs that find one of SLURM's variables of a task expect all of them: Lightning decides by SLURM_NTASKS.
  constexpr std::array kNames = {
      "SLURM_PROCID",      "SLURM_LOCALID",  "SLURM_NODEID",       "SLURM_NPROCS",
      "SLURM_GTIDS",       "SLURM_TASK_PID", "SLURM_DISTRIBUTION", "SLURM_LAUNCH_NODE_IPADDR",
      "LOCKSTEP_TERMINAL", "LOCKSTEP_PAGE",  "LOCKSTEP_ENV_FROM"};
  return std::ranges::any_of(kPrefixes, [&](const char* prefix) { return name.starts_with(prefix); }) ||
         std::ranges::find(kNames, name) != kNames.end();
}

}  // namespace lockstep::launcher::process
