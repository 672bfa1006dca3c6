#include "lockstep/launch/slurm/step_task.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/identity/node_list.h"

namespace lockstep::launcher::slurm {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr int kNoAgentExitCode = 69;

/// The beginning of the name of the socket at which a task waits. It includes SLURM's name of this host, because
/// several SLURM nodes may be on one machine.
std::string socket_prefix(const std::string& step) {
  base::ContentHash hash;  // a name that no other name begins with
  hash.add(base::Env::this_process().slurmd_nodename.value_or(base::net::host_name()));
  return "lockstep-step-" + step + "-" + hash.hex_digest() + "-";
}

std::int64_t number(const base::Env::Value& value) { return base::parse_int(value.value_or("")).value_or(-1); }

}  // namespace

std::optional<std::vector<std::string>> task_arguments(int ranks, const base::Env& env) {
  if (ranks == 1 || !env.slurm_step_nodelist || !env.slurm_step_tasks_per_node || !env.slurm_job_id ||
      !env.slurm_step_id || number(env.slurm_procid) < 0)
    return std::nullopt;
  const std::vector<int> tasks =
      job::identity::expand_counts("SLURM_STEP_TASKS_PER_NODE", *env.slurm_step_tasks_per_node);
  if (std::ranges::any_of(tasks, [](int count) { return count != 1; })) return std::nullopt;
  const std::string step = *env.slurm_job_id + "." + *env.slurm_step_id;
  if (number(env.slurm_procid) > 0) return std::vector<std::string>{"agent", "--wait-in-step", step};
  std::string hosts;
  for (const std::string& host : job::identity::expand_hosts("SLURM_STEP_NODELIST", *env.slurm_step_nodelist))
    hosts += (hosts.empty() ? "" : ",") + host + (ranks > 0 ? ":" + std::to_string(ranks) : "");
  return std::vector<std::string>{"run", "-H", hosts, "--slurm-step", step};
}

int wait_for_agent(const std::string& step) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2})
    ::signal(signal, SIG_IGN);  // the launcher handles them
  const base::net::AbstractListener listener(socket_prefix(step));
  base::Fd agent;
  try {
    agent = listener.accept(Deadline::in(base::kStepAgentTimeout));
  } catch (const base::SystemError&) {
    return kNoAgentExitCode;
  }
  base::net::wait_readable(agent.get(), Deadline::never());  // bounded: it ends when the agent ends
  return 0;
}

base::Fd connect_to_task(const std::string& step) {
  const std::string prefix = socket_prefix(step);
  for (const Deadline deadline = Deadline::in(base::kStepTaskTimeout); !deadline.expired(); ::poll(nullptr, 0, 20)) {
    auto tasks = base::net::connect_to_all(prefix);
    if (!tasks.empty()) return std::move(tasks.front().fd);
  }
  return {};
}

}  // namespace lockstep::launcher::slurm
