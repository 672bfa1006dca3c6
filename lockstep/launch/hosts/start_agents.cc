#include "lockstep/launch/hosts/start_agents.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/join.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/hosts/remote_command.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kAgentStarts = 10s;  // after its host was reached
constexpr auto kEachHost = 100ms;   // of this host's own work, which all share: 64 ssh clients took 6 s of two cores

AgentLink start_here(const Host& host, std::chrono::milliseconds silence, std::uint64_t max_files) {
  return {host.name.empty() ? base::host_name() : host.name, "",
          spawn_agent("/proc/self/exe", {"lockstep", "agent"}, own_environment(), false, max_files), silence};
}

AgentLink start_agent(const Host& host, const HostOptions& options, const Cargoes& cargo,
                      std::chrono::milliseconds silence, std::uint64_t max_files) {
  const std::string way = host.step ? "srun" : "ssh";
  const std::vector<std::string> agent = agent_words(host, options.attended);
  const std::string script = cargo ? shipping_script(*cargo, agent) : "";
  const std::vector<std::string> words =
      host.step ? srun_words(host, agent, script) : ssh_words(host, options.connect_timeout, script);
  const std::string path = find_program(way, base::Env::process().path.value_or("/usr/local/bin:/usr/bin:/bin"));
  AgentLink link(host.name, way,
                 spawn_agent(path, words, host.step ? environment_for_srun(own_environment()) : own_environment(), true,
                             max_files),
                 silence);
  if (cargo) link.ship(cargo);
  return link;
}

/// At a megabyte a second at least.
std::chrono::seconds time_to_ship(const std::vector<Cargo>& cargo) {
  std::size_t bytes = 0;
  for (const Cargo& one : cargo) bytes += one.content.size();
  return std::chrono::seconds(bytes >> 20);
}

class Gathering {
 public:
  Gathering(std::vector<Host> hosts, std::vector<AgentLink> agents)
      : hosts_(std::move(hosts)),
        agents_(std::move(agents)),
        sites_(agents_.size()),
        failed_(agents_.size()),
        took_(agents_.size()) {}

  bool complete() const {
    for (std::size_t i = 0; i < agents_.size(); ++i)
      if (!sites_[i] && !failed_[i]) return false;
    return true;
  }
  void turn(Deadline deadline, int signals);
  void give_up_waiting();
  Gathered take();

 private:
  void listen(std::size_t i);
  void take_site(std::size_t i, const Frame& frame);
  void fail(std::size_t i, base::UsageError error) { failed_[i] = std::move(error); }

  std::vector<Host> hosts_;
  std::vector<AgentLink> agents_;
  std::vector<std::optional<Site>> sites_;
  std::vector<std::optional<base::UsageError>> failed_;
  std::vector<std::chrono::milliseconds> took_;
  const Deadline::Clock::time_point begun_ = Deadline::Clock::now();
};

/// The agent's first frame, which must be its Site.
void Gathering::take_site(std::size_t i, const Frame& frame) {
  const std::string host = "host " + base::quoted(hosts_[i].name, 253);
  if (sites_[i] || frame.kind != FrameKind::kSite)
    throw base::Error(base::Cause::kProtocol, "no word of what it finds there");
  sites_[i] = decode_site(frame.payload);
  took_[i] = std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - begun_);
  if (sites_[i]->version != LOCKSTEP_VERSION)
    fail(i, base::UsageError(host + ": its lockstep is version " + base::quoted(sites_[i]->version, 80) +
                                 ", this one " + LOCKSTEP_VERSION,
                             "install the same version there"));
  else if (sites_[i]->build != job::build_id(""))
    fail(i, base::UsageError(host + ": its lockstep is another build (" + base::quoted(sites_[i]->build, 80) +
                                 ") than this one (" + job::build_id("") + ")",
                             "install the same one there, name it with --remote-path, or let --ship copy this one"));
}

void Gathering::listen(std::size_t i) {
  AgentLink& agent = agents_[i];
  try {
    for (const Frame& frame : agent.read()) take_site(i, frame);
  } catch (const base::Error& error) {
    return fail(
        i,
        base::UsageError(
            "host " + base::quoted(hosts_[i].name, 253) + ": what came was not from lockstep (" + error.what() + ")",
            "does a start file of the shell there, such as ~/.bashrc, print something? It must not when nobody looks"));
  }
  if (agent.descriptor() >= 0 || failed_[i]) return;
  const RankEnd end = agent.reap();
  if (is_here(hosts_[i])) return fail(i, base::UsageError("the agent " + to_text(end)));
  fail(i, start_error(hosts_[i], end.exit_code(), agent.words()));
}

void Gathering::turn(Deadline deadline, int signals) {
  std::vector<pollfd> entries = {{signals, POLLIN, 0}};
  for (std::size_t i = 0; i < agents_.size(); ++i)
    entries.push_back({sites_[i] || failed_[i] ? -1 : agents_[i].descriptor(), POLLIN, 0});
  for (const AgentLink& agent : agents_) entries.push_back({agent.ships_to(), POLLOUT, 0});
  ::poll(entries.data(), entries.size(), deadline.poll_ms());
  if (entries[0].revents) heed_a_person(signals);
  for (std::size_t i = 0; i < agents_.size(); ++i)
    if (entries[i + 1 + agents_.size()].revents) agents_[i].ship_more();
  for (std::size_t i = 0; i < agents_.size(); ++i)
    if (entries[i + 1].revents) listen(i);
}

void Gathering::give_up_waiting() {
  for (std::size_t i = 0; i < agents_.size(); ++i) {
    if (sites_[i] || failed_[i]) continue;
    const std::string words = agents_[i].words();
    fail(i, base::UsageError("host " + base::quoted(hosts_[i].name, 253) + ": no answer" +
                                 (words.empty() ? "" : ": " + base::quoted(words, 512)),
                             "does " + std::string(hosts_[i].step ? "srun --overlap --nodelist=" : "ssh ") +
                                 hosts_[i].name + " true work at once, without a question?"));
  }
}

Gathered Gathering::take() {
  Gathered all{.hosts = std::move(hosts_),
               .agents = std::move(agents_),
               .sites = {},
               .failed = std::move(failed_),
               .took = std::move(took_)};
  for (auto& site : sites_) all.sites.push_back(site ? std::move(*site) : Site());
  return all;
}

}  // namespace

bool is_here(const Host& host) {
  if (host.step) return host.here;
  return host.user.empty() && host.port == 0 &&
         (host.name.empty() || host.name == "localhost" || host.name == base::host_name());
}

void heed_a_person(int signals) {
  while (const auto signal = next_signal(signals))
    if (*signal == SIGINT || *signal == SIGTERM || *signal == SIGHUP)
      throw base::Error(base::Cause::kInterrupted,
                        "stopped by " + std::string(*signal == SIGINT ? "Ctrl-C (SIGINT)" : signal_name(*signal)) +
                            " before any rank was started");
    else if (*signal == SIGUSR1)
      throw base::Error(base::Cause::kPreempted, "asked to leave by SIGUSR1 before any rank was started",
                        "start the same command again");
}

void end_all(std::vector<AgentLink>& agents) {
  for (AgentLink& agent : agents) agent.kill();
  for (AgentLink& agent : agents) agent.reap();
}

void find_twins(Gathered& gathered) {
  for (std::size_t i = 0; i < gathered.sites.size(); ++i)
    for (std::size_t j = i + 1; j < gathered.sites.size(); ++j)
      if (!gathered.failed[i] && !gathered.failed[j] && !gathered.hosts[i].step && !gathered.hosts[j].step &&
          gathered.sites[i].machine == gathered.sites[j].machine)
        gathered.failed[j] = base::UsageError(
            "host " + base::quoted(gathered.hosts[j].name, 253) + ": it is the same machine as " +
                base::quoted(gathered.hosts[i].name, 253),
            "name it once, with all its slots; containers that are to count as hosts differ by LOCKSTEP_HOST_ID");
}

namespace {

void take_out_failed(Gathered& gathered) {
  Gathered left;
  std::vector<AgentLink> failed;
  for (std::size_t i = 0; i < gathered.agents.size(); ++i) {
    if (gathered.failed[i]) {
      failed.push_back(std::move(gathered.agents[i]));
      continue;
    }
    left.hosts.push_back(std::move(gathered.hosts[i]));
    left.agents.push_back(std::move(gathered.agents[i]));
    left.sites.push_back(std::move(gathered.sites[i]));
    left.failed.emplace_back();
    left.took.push_back(gathered.took[i]);
  }
  end_all(failed);
  gathered = std::move(left);
}

}  // namespace

/// A line each, so that one among many is seen; the first is what ends us.
void need(Gathered& gathered, std::size_t least) {
  const auto count = static_cast<std::size_t>(std::count_if(gathered.failed.begin(), gathered.failed.end(),
                                                            [](const auto& error) { return error.has_value(); }));
  if (count == 0) return;
  const bool enough = gathered.agents.size() - count >= least;
  std::optional<base::UsageError> first;
  for (const auto& failed : gathered.failed) {
    if (!failed) continue;
    if (enough || count > 1)
      std::fprintf(stderr, "lockstep: %s%s%s\n", failed->what(), failed->hint().empty() ? "" : "; ",
                   failed->hint().c_str());
    if (!first) first = failed;
  }
  if (enough) return take_out_failed(gathered);
  end_all(gathered.agents);
  if (count == 1) throw *first;
  throw base::UsageError(std::to_string(count) + " of " + std::to_string(gathered.agents.size()) +
                             " hosts cannot be used; the first: " + first->what(),
                         first->hint());
}

Gathered gather(const HostOptions& options, const Cargoes& cargo, std::chrono::milliseconds silence,
                std::uint64_t max_files, int signals) {
  const std::string own = own_path();
  std::vector<Host> hosts = options.hosts.empty() ? std::vector<Host>{{}} : options.hosts;
  for (Host& host : hosts)
    if (host.remote_path.empty()) host.remote_path = options.remote_path.empty() ? own : options.remote_path;
  std::vector<AgentLink> agents;
  for (const Host& host : hosts)
    agents.push_back(is_here(host) ? start_here(host, silence, max_files)
                                   : start_agent(host, options, cargo, silence, max_files));
  const Deadline deadline = Deadline::in(options.connect_timeout + kAgentStarts + agents.size() * kEachHost +
                                         (cargo ? time_to_ship(*cargo) : 0s));
  Gathering gathering(std::move(hosts), std::move(agents));
  while (!gathering.complete() && !deadline.expired()) gathering.turn(deadline, signals);
  gathering.give_up_waiting();
  return gathering.take();
}

}  // namespace lockstep::launcher
