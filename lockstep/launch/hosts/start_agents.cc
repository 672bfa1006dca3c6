#include "lockstep/launch/hosts/start_agents.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/join.h"
#include "lockstep/launch/hosts/remote_command.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"
#include "lockstep/launch/process/tools.h"

namespace lockstep::launcher::hosts {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kSshVersionTimeout = 5s;
constexpr auto kPerHostAllowance = 100ms;  // work of this host per agent: 64 ssh clients took 6 s on two cores

/// Starts an agent with two pipes. Its input ends when this process dies.
AgentProcess start_process(process::ChildSpec spec) {
  base::Pipe in = base::make_pipe();
  base::Pipe out = base::make_pipe();
  spec.in = in.read.get();
  spec.out = out.write.get();
  try {
    const pid_t pid = process::spawn(spec);
    return {pid, std::move(in.write), std::move(out.read), {}};
  } catch (const base::SystemError& error) {
    throw base::SystemError("cannot start the agent", error.error_number());
  }
}

/// Starts ssh or srun, which the kernel kills when this process ends. Its stderr goes to a file and is not printed.
AgentProcess start_remote_process(process::ChildSpec spec) {
  base::Fd err(::memfd_create("lockstep-ssh", MFD_CLOEXEC));
  if (!err) throw base::SystemError("cannot create a file for the messages of ssh", errno);
  spec.err = err.get();
  AgentProcess process = start_process(std::move(spec));
  process.err = std::move(err);
  return process;
}

AgentLink start_local_agent(const cli::HostSpec& host, std::chrono::milliseconds max_silence, std::uint64_t max_files) {
  return {host.name.empty() ? base::net::host_name() : host.name, "",
          start_process({.path = "/proc/self/exe",
                         .argv = {"lockstep", "agent"},
                         .environment = process::current_environment(),
                         .max_files = max_files,
                         .death_signal = 0}),
          max_silence};
}

/// Returns what `ssh -V` prints; "" if it cannot be executed.
std::string ssh_version(const std::string& path) {
  return process::run_tool({.path = path, .argv = {"ssh", "-V"}, .limit = kSshVersionTimeout}).err;
}

AgentLink start_remote_agent(const cli::HostSpec& host, const cli::HostOptions& options,
                             const StagedFiles& staged_files, std::chrono::milliseconds max_silence,
                             std::uint64_t max_files) {
  const std::string via = host.is_slurm ? "srun" : "ssh";
  const std::vector<std::string> agent = agent_arguments(host, options.slurm_step);
  const std::string script = staged_files ? staging_script(*staged_files, agent) : "";
  const std::string path =
      process::find_program(via, base::Env::this_process().path.value_or(process::kDefaultSearchPath));
  std::vector<std::string> words;
  if (host.is_slurm) {
    words = srun_command(host, agent, script);
  } else {
    static const bool is_new = has_session_options(ssh_version(path));
    words = ssh_command(host, options.connect_timeout, script, is_new);
  }
  AgentLink link(host.name, via,
                 start_remote_process({.path = path,
                                       .argv = words,
                                       .environment = host.is_slurm ? srun_environment(process::current_environment())
                                                                    : process::current_environment(),
                                       .max_files = max_files}),
                 max_silence);
  if (staged_files) link.stage_files(staged_files);
  return link;
}

/// Takes the connection to an agent in another pod, which may be missing.
AgentLink link_to_pod(cli::HostSpec& host, std::optional<PodMeeting::Agent> agent,
                      std::chrono::milliseconds max_silence) {
  if (!agent) return {host.name, "pod", {}, max_silence};
  host.name = agent->host;
  base::Fd to(::fcntl(agent->connection.get(), F_DUPFD_CLOEXEC, 3));
  return {host.name, "pod", {-1, std::move(to), std::move(agent->connection), {}}, max_silence};
}

/// Returns the time allowed for copying the files to a host, at 1 MiB/s.
std::chrono::seconds staging_time(const std::vector<StagedFile>& staged_files) {
  std::size_t bytes = 0;
  for (const StagedFile& file : staged_files) bytes += file.content.size();
  return std::chrono::seconds(bytes >> 20);
}

class AgentStartup {
 public:
  explicit AgentStartup(StartedAgents& started) : started_(started) {}

  bool complete() const {
    for (std::size_t i = 0; i < started_.agents.size(); ++i)
      if (!has_result(i)) return false;
    return true;
  }

  void poll_once(Deadline deadline, int signals) {
    std::vector<AgentLink>& agents = started_.agents;
    std::vector<pollfd> entries = {{signals, POLLIN, 0}};
    for (std::size_t i = 0; i < agents.size(); ++i)
      entries.push_back({has_result(i) ? -1 : agents[i].descriptor(), POLLIN, 0});
    for (const AgentLink& agent : agents) entries.push_back({agent.staging_fd(), POLLOUT, 0});
    ::poll(entries.data(), entries.size(), deadline.poll_ms());
    if (entries[0].revents) check_interrupted(signals);
    for (std::size_t i = 0; i < agents.size(); ++i)
      if (entries[i + 1 + agents.size()].revents) agents[i].continue_staging();
    for (std::size_t i = 0; i < agents.size(); ++i)
      if (entries[i + 1].revents) read_agent(i);
  }

  void fail_unanswered() {
    for (std::size_t i = 0; i < started_.agents.size(); ++i) {
      if (has_result(i)) continue;
      const std::string text = started_.agents[i].stderr_text();
      fail(i, host(i) + "no answer" + (text.empty() ? "" : ": " + base::quoted(text, 512)),
           started_.hosts[i].is_pod
               ? "see what lockstep run prints in this pod"
               : "make sure that " + std::string(started_.hosts[i].is_slurm ? "srun --overlap --nodelist=" : "ssh ") +
                     started_.hosts[i].name + " true works at once and asks no question");
    }
  }

 private:
  bool has_result(std::size_t i) const { return started_.infos[i] || started_.failed[i]; }

  void read_agent(std::size_t i) {
    AgentLink& agent = started_.agents[i];
    try {
      for (const protocol::Frame& frame : agent.read()) take_host_info(i, frame);
    } catch (const base::Error& error) {
      return fail(i,
                  host(i) + "the output there is not from lockstep: it begins with " +
                      base::quoted(agent.first_output(), 200) + " (" + error.what() + ")",
                  "make sure that no start file of the shell there, such as ~/.bashrc, prints "
                  "anything in a non-interactive shell");
    }
    if (agent.descriptor() >= 0 || started_.failed[i]) return;
    const protocol::RankExit end = agent.reap();
    if (started_.hosts[i].is_pod && !started_.hosts[i].is_local)
      return fail(i, host(i) + "the agent ended", "see what lockstep run prints in this pod");
    if (is_local_host(started_.hosts[i])) return fail(i, "the agent ended: " + protocol::to_text(end));
    const std::string text = agent.stderr_text();
    started_.failed[i] =
        agent_start_error(started_.hosts[i], end.exit_code(), text.empty() ? agent.first_output() : text);
  }

  void take_host_info(std::size_t i, const protocol::Frame& frame) {
    std::optional<plan::HostInfo>& info = started_.infos[i];
    if (info || frame.kind != protocol::FrameKind::kHostInfo)
      throw base::Error(base::Cause::kProtocol, "the first frame is not a HostInfo");
    info = protocol::decode_host_info(frame.payload);
    started_.startup_times[i] = std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - begun_);
    if (info->version != LOCKSTEP_VERSION)
      fail(i,
           host(i) + "lockstep there is version " + base::quoted(info->version, 80) + "; expected " + LOCKSTEP_VERSION,
           "install the same version there");
    else if (info->build != job::build_id(""))
      fail(i, host(i) + "lockstep there is build " + base::quoted(info->build, 80) + "; expected " + job::build_id(""),
           "install the same build there, name its path with --remote-path, or copy this one with --ship");
  }

  void fail(std::size_t i, const std::string& what, const std::string& hint = {}) {
    started_.failed[i] = base::UsageError(what, hint);
  }

  std::string host(std::size_t i) const { return "host " + base::quoted(started_.hosts[i].name, 253) + ": "; }

  StartedAgents& started_;
  const Deadline::Clock::time_point begun_ = Deadline::Clock::now();
};

void remove_failed(StartedAgents& started) {
  StartedAgents left;
  std::vector<AgentLink> failed;
  for (std::size_t i = 0; i < started.agents.size(); ++i) {
    if (started.failed[i]) {
      failed.push_back(std::move(started.agents[i]));
      continue;
    }
    left.hosts.push_back(std::move(started.hosts[i]));
    left.agents.push_back(std::move(started.agents[i]));
    left.infos.push_back(std::move(started.infos[i]));
    left.failed.emplace_back();
    left.startup_times.push_back(started.startup_times[i]);
  }
  kill_agents(failed);
  started = std::move(left);
}

}  // namespace

bool is_local_host(const cli::HostSpec& host) {
  if (host.is_slurm || host.is_pod) return host.is_local;
  return host.user.empty() && host.port == 0 &&
         (host.name.empty() || host.name == "localhost" || host.name == base::net::host_name());
}

void check_interrupted(int signals) {
  while (const auto signal = process::read_signal(signals))
    if (*signal == SIGINT || *signal == SIGQUIT || *signal == SIGTERM || *signal == SIGHUP)
      throw base::Error(base::Cause::kInterrupted,
                        "stopped by " + std::string(*signal == SIGINT ? "Ctrl-C (SIGINT)" : job::signal_name(*signal)) +
                            " before any rank was started");
    else if (*signal == SIGUSR1)
      throw base::Error(base::Cause::kPreempted, "asked to leave by SIGUSR1 before any rank was started",
                        "start the same command again");
}

void kill_agents(std::vector<AgentLink>& agents) {
  for (AgentLink& agent : agents) agent.kill();
  for (AgentLink& agent : agents) agent.reap();
}

void mark_duplicate_hosts(StartedAgents& started) {
  for (std::size_t i = 0; i < started.infos.size(); ++i)
    for (std::size_t j = i + 1; j < started.infos.size(); ++j)
      if (!started.failed[i] && !started.failed[j] && !started.hosts[i].is_slurm && !started.hosts[j].is_slurm &&
          !started.hosts[i].is_pod && started.infos[i]->machine == started.infos[j]->machine)
        started.failed[j] =
            base::UsageError("host " + base::quoted(started.hosts[j].name, 253) + ": it is the same machine as " +
                                 base::quoted(started.hosts[i].name, 253),
                             "list it once, with all its slots; containers that count as hosts need different values "
                             "of LOCKSTEP_HOST_ID");
}

/// Prints one line per failed host. If there is only one and the launcher ends because of it, the exception has the
/// line.
void require_hosts(StartedAgents& started, std::size_t min_hosts) {
  const auto count = static_cast<std::size_t>(
      std::ranges::count_if(started.failed, [](const auto& error) { return error.has_value(); }));
  if (count == 0) return;
  const bool enough = started.agents.size() - count >= min_hosts;
  std::optional<base::UsageError> first;
  for (const auto& failed : started.failed) {
    if (!failed) continue;
    if (enough || count > 1)
      std::fprintf(stderr, "lockstep: %s%s%s\n", failed->what(), failed->hint().empty() ? "" : "; ",
                   failed->hint().c_str());
    if (!first) first = failed;
  }
  if (enough) return remove_failed(started);
  kill_agents(started.agents);
  if (count == 1) throw *first;
  throw base::UsageError(std::to_string(count) + " of " + std::to_string(started.agents.size()) +
                             " hosts cannot be used; the first: " + first->what(),
                         first->hint());
}

std::string resolve_program(const cli::HostOptions& options, const std::string& name) {
  const bool is_local = options.hosts.empty() || std::ranges::any_of(options.hosts, is_local_host);
  const bool relative = name.find('/') != std::string::npos && name[0] != '/';
  if (name.find('/') != std::string::npos && (!is_local || (relative && !options.directory.empty()))) return name;
  return process::find_program(name, base::Env::this_process().path.value_or(process::kDefaultSearchPath));
}

StartedAgents start_agents(const cli::HostOptions& options, const StagedFiles& staged_files,
                           std::chrono::milliseconds max_silence, std::uint64_t max_files, int signals,
                           std::vector<std::optional<PodMeeting::Agent>> pod_agents) {
  const std::string own = process::executable_path();
  StartedAgents started;
  started.hosts = options.hosts.empty() ? std::vector<cli::HostSpec>{{}} : options.hosts;
  for (cli::HostSpec& host : started.hosts)
    if (host.remote_path.empty()) host.remote_path = options.remote_path.empty() ? own : options.remote_path;
  auto pod_agent = pod_agents.begin();
  for (cli::HostSpec& host : started.hosts) {
    started.failed.emplace_back();
    if (!is_local_host(host) && host.is_pod && !*pod_agent)
      started.failed.back() = base::UsageError(host.name + " has not started lockstep run",
                                               "see whether it runs: kubectl get pods; see also --join-timeout");
    started.agents.push_back(is_local_host(host) ? start_local_agent(host, max_silence, max_files)
                             : host.is_pod ? link_to_pod(host, std::move(*pod_agent++), max_silence)
                                           : start_remote_agent(host, options, staged_files, max_silence, max_files));
  }
  const std::size_t num_agents = started.agents.size();
  started.infos.resize(num_agents);
  started.startup_times.resize(num_agents);
  const Deadline deadline =
      Deadline::in(options.connect_timeout + base::kAgentStartTimeout + num_agents * kPerHostAllowance +
                   (staged_files ? staging_time(*staged_files) : 0s));
  AgentStartup startup(started);
  while (!startup.complete() && !deadline.expired()) startup.poll_once(deadline, signals);
  startup.fail_unanswered();
  return started;
}

}  // namespace lockstep::launcher::hosts
