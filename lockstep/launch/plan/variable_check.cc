#include "lockstep/launch/plan/variable_check.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string_view>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/suggestion.h"

namespace lockstep::launcher::plan {
namespace {

constexpr std::string_view kPrefix = "LOCKSTEP_", kTestPrefix = "LOCKSTEP_TEST_";
constexpr double kMaxSeconds = 1e7;

using Check = std::function<void(const std::string& name, const std::string& value)>;

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& expected) {
  throw base::UsageError(name + " is " + base::quoted(value, 80) + "; expected " + expected);
}

Check one_of(std::vector<std::string> values) {
  return [values = std::move(values)](const std::string& name, const std::string& value) {
    if (std::find(values.begin(), values.end(), value) != values.end()) return;
    refuse(name, value, base::alternatives(values));
  };
}

Check seconds(bool may_be_zero) {
  return [may_be_zero](const std::string& name, const std::string& value) {
    const auto number = base::parse_double(value);
    if (!number || *number < 0 || (*number == 0 && !may_be_zero) || *number > kMaxSeconds)
      refuse(name, value,
             may_be_zero ? "seconds, from 0 (no limit) to 10000000" : "seconds, more than 0 and at most 10000000");
  };
}

void check_device(const std::string& name, const std::string& value) {
  const bool is_numbered = value.starts_with("cuda:") && base::parse_int(value.substr(5)).value_or(-1) >= 0;
  if (value != "auto" && value != "cpu" && value != "cuda" && !is_numbered)
    refuse(name, value, "auto, cpu, cuda or cuda:N");
}

const std::map<std::string, Check>& checks() {
  static const std::map<std::string, Check> all = {
      {"LOCKSTEP_TRANSPORT", one_of({"auto", "self", "shm", "hierarchy", "tcp", "mpi", "nccl"})},
      {"LOCKSTEP_CROSS_HOST_TRANSPORT", one_of({"auto", "tcp", "mpi"})},
      {"LOCKSTEP_ENV_FROM", one_of({"auto", "none", "lockstep", "torchrun", "mpi", "slurm", "pmi"})},
      {"LOCKSTEP_ARENA", one_of({"on", "off"})},
      {"LOCKSTEP_LOG", one_of({"quiet", "info"})},
      {"LOCKSTEP_TRACE", one_of({"0", "1"})},
      {"LOCKSTEP_INSTRUCTION_SET", one_of({"baseline", "avx2", "avx512"})},
      {"LOCKSTEP_DEVICE", check_device},
      {"LOCKSTEP_TIMEOUT", seconds(true)},
      {"LOCKSTEP_JOIN_TIMEOUT", seconds(false)},
      {"LOCKSTEP_HOST_TIMEOUT",
       [](const std::string& name, const std::string& value) { base::parse_int_in_range(name, value, 1, 3600); }},
      {"LOCKSTEP_INJECT",
       [](const std::string& name, const std::string& value) { job::parse_injection(name.c_str(), value); }},
  };
  return all;
}

}  // namespace

std::vector<std::string> check_lockstep_variables(const process::Environment& environment) {
  const std::vector<std::string> known = base::Env::lockstep_names();
  std::vector<std::string> warnings;
  for (const std::string& variable : environment) {
    const std::string name(process::variable_name(variable));
    if (!name.starts_with(kPrefix) || name.starts_with(kTestPrefix)) continue;
    const std::string value = variable.substr(std::min(variable.size(), name.size() + 1));
    if (std::find(known.begin(), known.end(), name) == known.end())
      warnings.push_back("the variable " + base::quoted(name, 80) + " does not exist" + cli::suggestion(name, known));
    else if (const auto check = checks().find(name); check != checks().end() && !value.empty())
      check->second(name, value);
  }
  return warnings;
}

}  // namespace lockstep::launcher::plan
