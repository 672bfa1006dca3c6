#include "lockstep/launch/slurm/step_task.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/identity/node_list.h"

namespace lockstep::launcher::slurm {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr int kNoAgentExitCode = 69;

/// Stores an abstract socket name in `address` and returns its length. The name includes SLURM's name of this host,
/// because several SLURM nodes may be on one machine.
socklen_t socket_address(const std::string& step, sockaddr_un& address) {
  const std::string name = "lockstep." + std::to_string(::getuid()) + "." + step + "." +
                           base::Env::this_process().slurmd_nodename.value_or(base::net::host_name());
  address.sun_family = AF_UNIX;
  const std::size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::getuid();
}

base::Fd make_socket() {
  base::Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw base::SystemError("cannot create a socket", errno);
  return fd;
}

std::int64_t number(const base::Env::Value& value) { return base::parse_int(value.value_or("")).value_or(-1); }

}  // namespace

std::optional<std::vector<std::string>> task_arguments(int ranks, const base::Env& env) {
  if (ranks == 1 || !env.slurm_step_nodelist || !env.slurm_step_tasks_per_node || !env.slurm_job_id ||
      !env.slurm_step_id || number(env.slurm_procid) < 0)
    return std::nullopt;
  const std::vector<int> tasks =
      job::identity::expand_counts("SLURM_STEP_TASKS_PER_NODE", *env.slurm_step_tasks_per_node);
  if (std::any_of(tasks.begin(), tasks.end(), [](int count) { return count != 1; })) return std::nullopt;
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
  sockaddr_un address{};
  const socklen_t size = socket_address(step, address);
  const base::Fd listener = make_socket();
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(listener.get(), 8) != 0)
    throw base::SystemError("cannot wait for the agent of step " + base::quoted(step, 80), errno);
  const Deadline deadline = Deadline::in(base::kStepAgentTimeout);
  while (base::net::wait_readable(listener.get(), deadline)) {
    const base::Fd agent(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!agent || !is_same_user(agent.get())) continue;
    base::net::wait_readable(agent.get(), Deadline::never());  // bounded: it ends when the agent ends
    return 0;
  }
  return kNoAgentExitCode;
}

base::Fd connect_to_task(const std::string& step) {
  sockaddr_un address{};
  const socklen_t size = socket_address(step, address);
  for (const Deadline deadline = Deadline::in(base::kStepTaskTimeout); !deadline.expired(); ::poll(nullptr, 0, 20)) {
    base::Fd fd = make_socket();
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0)
      return is_same_user(fd.get()) ? std::move(fd) : base::Fd();
  }
  return {};
}

}  // namespace lockstep::launcher::slurm
