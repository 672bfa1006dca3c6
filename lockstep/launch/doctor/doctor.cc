#include "lockstep/launch/doctor/doctor.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <optional>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/doctor/diagnosis.h"
#include "lockstep/launch/doctor/doctor_messages.h"
#include "lockstep/launch/doctor/findings_table.h"
#include "lockstep/launch/hosts/agent_query.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/protocol/connectivity_probe.h"
#include "lockstep/launch/protocol/network_messages.h"
#include "lockstep/launch/slurm/allocation.h"
#include "lockstep/launch/supervise/run.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

constexpr int kLauncher = -1;                  // its number in a ConnectivityProbe
constexpr auto kReplyTimeout = 10s;            // what takes no time there; they give a connection 5 s
constexpr auto kHostFactsTimeout = 90s;        // tools have 60 s, and a slow file system 10 s
constexpr auto kMeasureTimeout = 15s;          // 5 s to connect and 5 to measure
constexpr std::size_t kMaxFullMeshHosts = 16;  // 120 pairs; beyond, neighbours

using HostIndices = std::vector<std::size_t>;

class DoctorSession {
 public:
  DoctorSession(const DoctorOptions& options, StartedAgents started, int signals)
      : options_(options),
        started_(std::move(started)),
        connectivity_(kLauncher, ConnectivityProbe::make_token()),
        query_(started_.agents, connectivity_, signals,
               [this](std::size_t i, const std::string& why) { mark_lost(i, why); }) {}

  DoctorFacts run(const LaunchContext& context);
  /// Ends the agents.
  void end_agents();

 private:
  void begin();
  HostIndices reachable_hosts() const;
  void mark_lost(std::size_t i, const std::string& why);
  void read_clocks();
  void request_host_facts(const LaunchContext& context);
  void find_routes();
  void choose_routes(const std::vector<RouteReply>& replies, std::size_t num_addresses);
  void probe_links(int way);
  void measure_links();
  void measure(LinkReport& pair);

  const DoctorOptions& options_;
  StartedAgents started_;
  ConnectivityProbe connectivity_;
  AgentQuery query_;
  DoctorFacts doctor_facts_;
};

void DoctorSession::begin() {
  doctor_facts_.model_bytes = options_.model_bytes;
  doctor_facts_.mpi = options_.mpi;
  for (std::size_t i = 0; i < started_.agents.size(); ++i) {
    HostReport file;
    file.name = started_.hosts[i].name.empty() ? base::host_name() : started_.hosts[i].name;
    file.way = started_.agents[i].way();
    file.reached = !started_.infos[i].host.empty();
    file.took = started_.took[i];
    file.info = started_.infos[i];
    if (started_.failed[i]) {
      file.failed = started_.failed[i]->what();
      const std::string who = "host " + base::quoted(started_.hosts[i].name, 253) + ": ";  // the table says it, too
      if (file.failed.rfind(who, 0) == 0) file.failed.erase(0, who.size());
      file.hint = started_.failed[i]->hint();
    }
    doctor_facts_.hosts.push_back(std::move(file));
  }
}

/// Those that can be asked.
HostIndices DoctorSession::reachable_hosts() const {
  HostIndices all;
  for (std::size_t i = 0; i < doctor_facts_.hosts.size(); ++i)
    if (doctor_facts_.hosts[i].reached && doctor_facts_.hosts[i].failed.empty() && doctor_facts_.hosts[i].lost.empty())
      all.push_back(i);
  return all;
}

void DoctorSession::mark_lost(std::size_t i, const std::string& why) {
  doctor_facts_.hosts[i].lost = why;
  started_.agents[i].kill();
}

void DoctorSession::read_clocks() {
  using Clock = std::chrono::system_clock;
  std::vector<Clock::time_point> asked(doctor_facts_.hosts.size());
  query_.ask(
      reachable_hosts(), FrameKind::kClockRequest,
      [&](std::size_t i) {
        asked[i] = Clock::now();
        return std::string();
      },
      FrameKind::kClockReply, kReplyTimeout,
      [&](std::size_t i, const std::string& payload) {
        const Clock::time_point there{
            std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(decode_numbers(payload, 1)[0]))};
        doctor_facts_.hosts[i].clock_offset = there - (asked[i] + (Clock::now() - asked[i]) / 2);
      });
}

void DoctorSession::request_host_facts(const LaunchContext& context) {
  const auto order = [&](std::size_t i) {
    const Node node{.info = doctor_facts_.hosts[i].info, .here = is_local_host(started_.hosts[i])};
    std::vector<std::string> command = options_.command;
    if (!command.empty()) command.front() = context.program;
    return encode_host_facts_request(
        {.command = std::move(command),
         .directory = context.directory.empty() && !node.here ? context.here : context.directory,
         .extends_own_environment = !node.here,
         .environment = merged(inherited_environment(node, context), {}),
         .mpi = options_.mpi});
  };
  query_.ask(
      reachable_hosts(), FrameKind::kHostFactsRequest, order, FrameKind::kHostFacts, kHostFactsTimeout,
      [&](std::size_t i, const std::string& payload) { doctor_facts_.hosts[i].facts = decode_host_facts(payload); });
}

/// As launcher::meet(), but whoever does not come is a finding.
void DoctorSession::find_routes() {
  const std::vector<base::InterfaceAddress> own = launcher_addresses(options_.interface);
  RouteRequest order{.token = connectivity_.token()};
  for (const base::InterfaceAddress& one : own) order.launcher.push_back(connectivity_.listen(one.address));
  std::vector<RouteReply> replies(doctor_facts_.hosts.size());
  const auto ordered = [&](std::size_t i) {
    order.self = static_cast<int>(i);
    order.interface = started_.hosts[i].interface.empty() ? options_.interface : started_.hosts[i].interface;
    return encode_route_request(order);
  };
  query_.ask(reachable_hosts(), FrameKind::kRouteRequest, ordered, FrameKind::kRouteReply, kReplyTimeout,
             [&](std::size_t i, const std::string& payload) { replies[i] = decode_route_reply(payload); });
  choose_routes(replies, own.size());
}

/// Those at the address of ours that most hosts reach.
void DoctorSession::choose_routes(const std::vector<RouteReply>& replies, std::size_t num_addresses) {
  std::vector<int> counts(num_addresses);
  for (const RouteReply& reply : replies)
    for (const Route& route : reply.routes)
      if (route.launcher >= 0 && static_cast<std::size_t>(route.launcher) < num_addresses)
        ++counts[static_cast<std::size_t>(route.launcher)];
  const auto way = static_cast<int>(std::max_element(counts.begin(), counts.end()) - counts.begin());
  for (std::size_t i = 0; i < replies.size(); ++i) {
    const auto route = std::find_if(replies[i].routes.begin(), replies[i].routes.end(),
                                    [&](const Route& one) { return one.launcher == way; });
    if (route != replies[i].routes.end())
      doctor_facts_.hosts[i].route = *route;
    else if (!replies[i].error.empty())
      doctor_facts_.hosts[i].no_route = "it does not reach this host: " + replies[i].error;
  }
  probe_links(way);
}

/// All dial all.
void DoctorSession::probe_links(int way) {
  ProbeRequest order{.launcher = way, .peers = {}};
  HostIndices routed;
  for (const std::size_t i : reachable_hosts())
    if (doctor_facts_.hosts[i].route) routed.push_back(i);
  for (const HostReport& host : doctor_facts_.hosts)
    order.peers.push_back(host.route ? host.route->address : base::Address());
  std::vector<std::vector<ProbeFailure>> failures(doctor_facts_.hosts.size());
  query_.ask(
      routed, FrameKind::kProbeRequest, [&](std::size_t) { return encode_probe_request(order); },
      FrameKind::kProbeReply, kReplyTimeout,
      [&](std::size_t i, const std::string& payload) { failures[i] = decode_probe_failures(payload); });
  const auto why = [&](std::size_t from, std::size_t to) {
    for (const ProbeFailure& failure : failures[from])
      if (failure.node == static_cast<int>(to))
        return doctor_facts_.hosts[from].name + " does not reach " + order.peers[to].host + ": " + failure.why;
    return std::string();
  };
  for (std::size_t a = 0; a < routed.size(); ++a)
    for (std::size_t b = a + 1; b < routed.size(); ++b) {
      const std::size_t from = routed[a], to = routed[b];
      const std::string there = why(from, to), back = why(to, from);
      const bool reaches = there.empty() && back.empty();
      const bool measured = routed.size() <= kMaxFullMeshHosts || b == a + 1;
      if (!reaches || measured)
        doctor_facts_.pairs.push_back(
            {.from = from,
             .to = to,
             .reaches = reaches,
             .speed = {.error = there.empty() || back.empty() ? there + back : there + "; " + back}});
    }
}

/// One pair after the other, so that they share no link.
void DoctorSession::measure_links() {
  for (LinkReport& pair : doctor_facts_.pairs)
    if (pair.reaches) measure(pair);
}

void DoctorSession::measure(LinkReport& pair) {
  const HostIndices here = reachable_hosts();
  for (const std::size_t end : {pair.from, pair.to})
    if (std::find(here.begin(), here.end(), end) == here.end()) {
      pair.speed.error = doctor_facts_.hosts[end].name + " does not answer any more";
      return;
    }
  const std::string token = ConnectivityProbe::make_token();
  ListenReply reply{.address = {}, .error = "no answer"};
  const auto listen = [&](std::size_t) {
    return encode_listen_request({.self = static_cast<int>(pair.to),
                                  .caller = static_cast<int>(pair.from),
                                  .token = token,
                                  .host = doctor_facts_.hosts[pair.to].route->address.host});
  };
  query_.ask({pair.to}, FrameKind::kListenRequest, listen, FrameKind::kListenReply, kMeasureTimeout,
             [&](std::size_t, const std::string& payload) { reply = decode_listen_reply(payload); });
  if (!reply.error.empty()) {
    pair.speed.error = reply.error;
    return;
  }
  pair.speed.error = "no answer";
  const auto order = [&](std::size_t) {
    return encode_measure_request({.self = static_cast<int>(pair.from),
                                   .peer = static_cast<int>(pair.to),
                                   .token = token,
                                   .address = reply.address});
  };
  query_.ask({pair.from}, FrameKind::kMeasureRequest, order, FrameKind::kLinkSpeed, kMeasureTimeout,
             [&](std::size_t, const std::string& payload) { pair.speed = decode_link_speed(payload); });
}

DoctorFacts DoctorSession::run(const LaunchContext& context) {
  begin();
  read_clocks();
  request_host_facts(context);
  const bool elsewhere =
      std::any_of(started_.hosts.begin(), started_.hosts.end(), [](const Host& host) { return !is_local_host(host); });
  if (elsewhere && !reachable_hosts().empty()) {
    find_routes();
    measure_links();
  }
  return std::move(doctor_facts_);
}

void DoctorSession::end_agents() {
  for (std::size_t i = 0; i < started_.agents.size(); ++i) {
    AgentLink& agent = started_.agents[i];
    if (started_.failed[i]) agent.kill();
    agent.reap();
  }
}

/// A program that is not here is a finding, as anywhere else.
std::string find_requested_program(const DoctorOptions& options) {
  if (options.command.empty()) return "";
  try {
    return resolve_program(options, options.command.front());
  } catch (const base::UsageError&) {
    return options.command.front();
  }
}

}  // namespace

int doctor(DoctorOptions options) {
  options.hosts = resolve_hosts(std::move(options.hosts), options.env_from, base::Env::this_process());
  LaunchContext context;
  context.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  context.here = std::filesystem::current_path();
  context.environment = current_environment();
  context.program = find_requested_program(options);
  const base::Fd signals(make_signal_fd(handled_signals()));
  become_subreaper();
  StartedAgents started =
      start_agents(options, nullptr, 0ms, base::raise_fd_limit(8 * options.hosts.size() + 64), signals.get());
  DoctorSession session(options, std::move(started), signals.get());
  DoctorFacts doctor_facts = session.run(context);
  session.end_agents();
  if (options.mpi)
    doctor_facts.own_mpirun =
        run_tool({find_tool("mpirun", context.environment), {"mpirun", "--version"}, context.environment, "", 10s});
  const std::vector<Finding> findings = diagnose(doctor_facts);
  std::fputs((options.json ? to_json(findings) : to_table(findings)).c_str(), stdout);
  return has_bad(findings) ? 1 : 0;
}

}  // namespace lockstep::launcher
