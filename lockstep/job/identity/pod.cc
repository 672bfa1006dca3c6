#include "lockstep/job/identity/pod.h"

#include <algorithm>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job::identity {
namespace {

using base::Env;

constexpr int kMaxPods = 1 << 20;

struct Variable {
  const char* name = "";
  Env::Value Env::* member = nullptr;

  Env::Value in(const Env& env) const { return member ? env.*member : std::nullopt; }
};

struct PodVariables {
  Variable index, num_pods, ranks, host, port;
};

const PodVariables kPodVariables[] = {
    {{"PET_NODE_RANK", &Env::pet_node_rank},
     {"PET_NNODES", &Env::pet_nnodes},
     {"PET_NPROC_PER_NODE", &Env::pet_nproc_per_node},
     {"PET_MASTER_ADDR", &Env::pet_master_addr},
     {"PET_MASTER_PORT", &Env::pet_master_port}},
    {{"RANK", &Env::rank},
     {"WORLD_SIZE", &Env::world_size},
     {"NPROC_PER_NODE", &Env::nproc_per_node},
     {"MASTER_ADDR", &Env::master_addr},
     {"MASTER_PORT", &Env::master_port}},
    {{"JOB_COMPLETION_INDEX", &Env::job_completion_index}, {}, {}, {}, {}},
};

/// Returns the number in a variable, `otherwise` without one, and -1 for a range of torchrun, such as 1:4.
int number_in(const Env& env, const Variable& variable, int low, int otherwise) {
  const Env::Value value = variable.in(env);
  if (!value) return otherwise;
  if (variable.member == &Env::pet_nnodes && value->find(':') != std::string::npos) return -1;
  return static_cast<int>(base::parse_int_in_range(variable.name, *value, low, kMaxPods));
}

Pod pod_of(const Env& env, const PodVariables& variables) {
  Pod pod{.index = number_in(env, variables.index, 0, -1),
          .num_pods = number_in(env, variables.num_pods, 1, -1),
          .host = variables.host.in(env),
          .port = variables.port.in(env),
          .variables = {}};
  if (const Env::Value ranks = variables.ranks.in(env); ranks && *ranks != "auto" && *ranks != "gpu" && *ranks != "cpu")
    pod.ranks_per_pod = number_in(env, variables.ranks, 1, 0);
  std::vector<std::string> set;
  for (const Variable& variable : {variables.index, variables.num_pods, variables.ranks})
    if (const Env::Value value = variable.in(env)) set.push_back(std::string(variable.name) + "=" + *value);
  pod.variables = base::joined(set);
  return pod;
}

/// SM_HOSTS is a list in JSON, such as ["algo-1","algo-2"]. The port is the one that SageMaker's own start of torchrun
/// uses.
Pod pod_of_sagemaker(const Env& env) {
  const std::vector<std::string> parts = base::split(*env.sm_hosts, '"');
  std::vector<std::string> hosts;
  for (std::size_t i = 1; i < parts.size(); i += 2) hosts.push_back(parts[i]);
  Pod pod{.num_pods = static_cast<int>(hosts.size()), .variables = "SM_HOSTS=" + *env.sm_hosts};
  if (!hosts.empty()) {
    pod.host = hosts.front();
    pod.port = "7777";
  }
  const auto own = std::ranges::find(hosts, env.sm_current_host.value_or(""));
  if (own != hosts.end()) pod.index = static_cast<int>(own - hosts.begin());
  return pod;
}

}  // namespace

std::optional<Pod> find_pod(const Env& env) {
  if (env.lockstep_rank || env.local_rank || env.torchelastic_run_id) return std::nullopt;
  for (const PodVariables& variables : kPodVariables)
    if (variables.index.in(env) || variables.num_pods.in(env)) return pod_of(env, variables);
  if (env.sm_hosts) return pod_of_sagemaker(env);
  return std::nullopt;
}

void check_is_complete(const Pod& pod) {
  const bool is_counted = pod.index >= 0 && pod.num_pods >= 0;
  if (!is_counted || (pod.num_pods > 1 && (!pod.host || !pod.port)))
    throw base::UsageError(
        "this is one of several pods (" + pod.variables + "), but no variables name " +
            (is_counted ? "the address of the first" : "its index and their number"),
        "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each; LOCKSTEP_ENV_FROM=none, for lockstep run "
        "--env-from none, makes each a job of its own");
  if (pod.index >= pod.num_pods)
    throw base::UsageError("the index of this pod is not below the number of pods: " + pod.variables);
}

base::net::Address first_address(const Pod& pod) {
  return {*pod.host,
          static_cast<std::uint16_t>(base::parse_int_in_range("the port of the first pod", *pod.port, 1, 65535))};
}

std::optional<Pod> find_pod_of_several(const Env& env) {
  std::optional<Pod> pod = find_pod(env);
  if (pod) check_is_complete(*pod);
  if (pod && pod->num_pods == 1) return std::nullopt;
  return pod;
}

}  // namespace lockstep::job::identity
