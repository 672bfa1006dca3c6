#include "lockstep/launch/doctor/doctor.h"

#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/connectivity_probe.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/doctor/diagnosis.h"
#include "lockstep/launch/doctor/doctor_messages.h"
#include "lockstep/launch/hosts/agent_query.h"
#include "lockstep/launch/hosts/network_check.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/output/last_fatal.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/slurm/allocation.h"

namespace lockstep::launcher::doctor {
namespace {

using namespace std::chrono_literals;

constexpr int kLauncher = -1;  // the launcher's number in a ConnectivityProbe

using HostIndices = std::vector<std::size_t>;

class DoctorSession {
 public:
  DoctorSession(const cli::DoctorOptions& options, hosts::StartedAgents started, int signals)
      : options_(options),
        started_(std::move(started)),
        connectivity_(kLauncher, base::net::ConnectivityProbe::make_token()),
        query_(started_.agents, connectivity_, signals,
               [this](std::size_t i, const std::string& why) { mark_lost(i, why); }) {}

  DoctorFacts run(const plan::LaunchContext& context) {
    init_facts();
    read_clocks();
    request_host_facts(context);
    const bool has_remote_host = !std::ranges::all_of(started_.hosts, hosts::is_local_host);
    if (has_remote_host && !reachable_hosts().empty()) {
      find_routes();
      measure_links();
    }
    return std::move(doctor_facts_);
  }

  /// Ends all agents and waits until they have exited.
  void end_agents() {
    for (std::size_t i = 0; i < started_.agents.size(); ++i) {
      hosts::AgentLink& agent = started_.agents[i];
      if (started_.failed[i]) agent.kill();
      agent.reap();
    }
  }

 private:
  void init_facts() {
    doctor_facts_.model_bytes = options_.model_bytes;
    doctor_facts_.mpi = options_.mpi;
    for (std::size_t i = 0; i < started_.agents.size(); ++i) {
      HostReport report;
      report.name = started_.hosts[i].name.empty() ? base::net::host_name() : started_.hosts[i].name;
      report.via = started_.agents[i].via();
      report.reached = started_.infos[i].has_value();
      report.startup_time = started_.startup_times[i];
      report.info = started_.infos[i].value_or(plan::HostInfo());
      if (started_.failed[i]) {
        report.failed = started_.failed[i]->what();
        const std::string prefix =
            "host " + base::quoted(started_.hosts[i].name, 253) + ": ";  // the table has a column for the host
        if (report.failed.rfind(prefix, 0) == 0) report.failed.erase(0, prefix.size());
        report.hint = started_.failed[i]->hint();
      }
      doctor_facts_.hosts.push_back(std::move(report));
    }
  }

  /// Returns the hosts whose agents reply.
  HostIndices reachable_hosts() const {
    HostIndices all;
    for (std::size_t i = 0; i < doctor_facts_.hosts.size(); ++i)
      if (doctor_facts_.hosts[i].reached && doctor_facts_.hosts[i].failed.empty() &&
          doctor_facts_.hosts[i].lost.empty())
        all.push_back(i);
    return all;
  }

  void mark_lost(std::size_t i, const std::string& why) {
    doctor_facts_.hosts[i].lost = why;
    started_.agents[i].kill();
  }

  void read_clocks() {
    using Clock = std::chrono::system_clock;
    std::vector<Clock::time_point> asked(doctor_facts_.hosts.size());
    query_.ask(
        reachable_hosts(), protocol::FrameKind::kClockRequest,
        [&](std::size_t i) {
          asked[i] = Clock::now();
          return std::string();
        },
        protocol::FrameKind::kClockReply, base::kDoctorReplyTimeout,
        [&](std::size_t i, const auto& payload) {
          const Clock::time_point there{std::chrono::duration_cast<Clock::duration>(
              std::chrono::nanoseconds(protocol::decode_numbers(payload, 1)[0]))};
          doctor_facts_.hosts[i].clock_offset = there - (asked[i] + (Clock::now() - asked[i]) / 2);
        });
  }

  void request_host_facts(const plan::LaunchContext& context) {
    const auto make_request = [&](std::size_t i) {
      const plan::Node node{.info = doctor_facts_.hosts[i].info, .is_local = hosts::is_local_host(started_.hosts[i])};
      std::vector<std::string> command = options_.command;
      if (!command.empty()) command.front() = context.program;
      return protocol::encoded(HostFactsRequest{
          .command = std::move(command),
          .directory = context.directory.empty() && !node.is_local ? context.launcher_directory : context.directory,
          .extends_own_environment = !node.is_local,
          .environment = process::merge_environment(plan::inherited_environment(node, context), {}),
          .mpi = options_.mpi});
    };
    query_.ask(reachable_hosts(), protocol::FrameKind::kHostFactsRequest, make_request, protocol::FrameKind::kHostFacts,
               base::kHostFactsTimeout,
               [&](std::size_t i, const auto& payload) { doctor_facts_.hosts[i].facts = decode_host_facts(payload); });
  }

  /// Does the same as check_network(), but a host that does not connect becomes a finding.
  void find_routes() {
    const std::vector<base::net::InterfaceAddress> own = hosts::launcher_addresses(options_.interface);
    protocol::RouteRequest request{.token = connectivity_.token(),
                                   .host_timeout_ms = static_cast<std::int32_t>(base::net::host_timeout().count())};
    for (const base::net::InterfaceAddress& address : own)
      request.launcher.push_back(connectivity_.listen(address.address));
    std::vector<protocol::RouteReply> replies(doctor_facts_.hosts.size());
    const auto make_request = [&](std::size_t i) {
      request.self = static_cast<int>(i);
      request.interface = started_.hosts[i].interface.empty() ? options_.interface : started_.hosts[i].interface;
      return protocol::encoded(request);
    };
    query_.ask(reachable_hosts(), protocol::FrameKind::kRouteRequest, make_request, protocol::FrameKind::kRouteReply,
               base::kDoctorReplyTimeout, [&](std::size_t i, const auto& payload) {
                 replies[i] = protocol::decoded<protocol::RouteReply>(payload);
               });
    choose_routes(replies, own.size());
  }

  /// Chooses the launcher's address that most hosts reach, and each host's route to it.
  void choose_routes(const std::vector<protocol::RouteReply>& replies, std::size_t num_addresses) {
    std::vector<int> counts(num_addresses);
    for (const protocol::RouteReply& reply : replies)
      for (const protocol::Route& route : reply.routes)
        if (route.launcher >= 0 && static_cast<std::size_t>(route.launcher) < num_addresses)
          ++counts[static_cast<std::size_t>(route.launcher)];
    const auto address_index = static_cast<int>(std::ranges::max_element(counts) - counts.begin());
    for (std::size_t i = 0; i < replies.size(); ++i) {
      const auto route = std::ranges::find(replies[i].routes, address_index, &protocol::Route::launcher);
      if (route != replies[i].routes.end())
        doctor_facts_.hosts[i].route = *route;
      else if (!replies[i].error.empty())
        doctor_facts_.hosts[i].no_route = "it cannot reach this host: " + replies[i].error;
    }
    probe_links(address_index);
  }

  /// Makes every host connect to others (checked_peers()), and records the links that fail.
  void probe_links(int address_index) {
    HostIndices routed;
    for (const std::size_t i : reachable_hosts())
      if (doctor_facts_.hosts[i].route) routed.push_back(i);
    std::vector<protocol::ProbeReply> failures(doctor_facts_.hosts.size());
    query_.ask(
        routed, protocol::FrameKind::kProbeRequest,
        [&](std::size_t i) {
          protocol::ProbeRequest request{.launcher = address_index, .peers = {}};
          const auto place = static_cast<std::size_t>(std::ranges::find(routed, i) - routed.begin());
          for (const std::size_t peer : hosts::checked_peers(place, routed.size()))
            request.peers.push_back({static_cast<int>(routed[peer]), doctor_facts_.hosts[routed[peer]].route->address});
          return protocol::encoded(request);
        },
        protocol::FrameKind::kProbeReply, base::kDoctorReplyTimeout,
        [&](std::size_t i, const auto& payload) { failures[i] = protocol::decoded<protocol::ProbeReply>(payload); });
    const auto why = [&](std::size_t from, std::size_t to) {
      for (const protocol::ProbeFailure& failure : failures[from])
        if (failure.node == static_cast<int>(to))
          return doctor_facts_.hosts[from].name + " cannot reach " + doctor_facts_.hosts[to].route->address.host +
                 ": " + failure.why;
      return std::string();
    };
    for (std::size_t a = 0; a < routed.size(); ++a)
      for (std::size_t b = a + 1; b < routed.size(); ++b) {
        const std::size_t from = routed[a], to = routed[b];
        const std::string there = why(from, to), back = why(to, from);
        const bool reaches = there.empty() && back.empty();
        const bool measured = routed.size() <= hosts::kMaxHostsInPairs || b == a + 1;
        if (!reaches || measured)
          doctor_facts_.links.push_back(
              {.from = from,
               .to = to,
               .reaches = reaches,
               .speed = {.error = there.empty() || back.empty() ? there + back : there + "; " + back}});
      }
  }

  /// Measures one link after another, so that measurements do not share the network.
  void measure_links() {
    for (LinkReport& link : doctor_facts_.links)
      if (link.reaches) measure(link);
  }

  void measure(LinkReport& link) {
    const HostIndices reachable = reachable_hosts();
    for (const std::size_t end : {link.from, link.to})
      if (std::ranges::find(reachable, end) == reachable.end()) {
        link.speed.error = doctor_facts_.hosts[end].name + " no longer replies";
        return;
      }
    const std::string token = base::net::ConnectivityProbe::make_token();
    ListenReply reply{.address = {}, .error = "no reply"};
    const auto listen = [&](std::size_t) {
      return protocol::encoded(ListenRequest{.self = static_cast<int>(link.to),
                                             .caller = static_cast<int>(link.from),
                                             .token = token,
                                             .host = doctor_facts_.hosts[link.to].route->address.host});
    };
    query_.ask({link.to}, protocol::FrameKind::kListenRequest, listen, protocol::FrameKind::kListenReply,
               base::kLinkReplyTimeout,
               [&](std::size_t, const auto& payload) { reply = protocol::decoded<ListenReply>(payload); });
    if (!reply.error.empty()) {
      link.speed.error = reply.error;
      return;
    }
    link.speed.error = "no reply";
    const auto make_request = [&](std::size_t) {
      return protocol::encoded(MeasureRequest{.self = static_cast<int>(link.from),
                                              .peer = static_cast<int>(link.to),
                                              .token = token,
                                              .address = reply.address});
    };
    query_.ask({link.from}, protocol::FrameKind::kMeasureRequest, make_request, protocol::FrameKind::kLinkSpeed,
               base::kLinkReplyTimeout,
               [&](std::size_t, const auto& payload) { link.speed = protocol::decoded<LinkSpeed>(payload); });
  }

  const cli::DoctorOptions& options_;
  hosts::StartedAgents started_;
  base::net::ConnectivityProbe connectivity_;
  hosts::AgentQuery query_;
  DoctorFacts doctor_facts_;
};

/// Returns the path of the program. If it does not exist on this host, returns its name: the check of each host then
/// reports that.
std::string find_requested_program(const cli::DoctorOptions& options) {
  if (options.command.empty()) return "";
  try {
    return hosts::resolve_program(options, options.command.front());
  } catch (const base::UsageError&) {
    return options.command.front();
  }
}

/// Returns "Debian GNU/Linux 12 (bookworm), Linux 6.1.0 x86_64, glibc 2.36".
std::string describe_system() {
  std::string distribution = "unknown distribution";
  std::ifstream file("/etc/os-release");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("PRETTY_NAME="))
      distribution = base::escaped(base::joined(base::split(line.substr(line.find('=') + 1), '"'), ""));
  utsname kernel{};
  ::uname(&kernel);
  return distribution + ", " + kernel.sysname + " " + kernel.release + " " + kernel.machine + ", glibc " +
         ::gnu_get_libc_version();
}

}  // namespace

int doctor(cli::DoctorOptions options) {
  options.hosts = slurm::resolve_hosts(std::move(options.hosts), options.env_from, base::Env::this_process());
  if (options.report && options.command.empty()) options.command = {"python3"};
  plan::LaunchContext context;
  context.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  context.launcher_directory = process::current_directory(options.directory);
  context.environment = process::current_environment();
  context.program = find_requested_program(options);
  const base::Fd signals(process::make_signal_fd(process::handled_signals()));
  process::become_subreaper();
  hosts::StartedAgents started =
      hosts::start_agents(options, nullptr, 0ms, base::raise_fd_limit(8 * options.hosts.size() + 64), signals.get());
  DoctorSession session(options, std::move(started), signals.get());
  DoctorFacts doctor_facts = session.run(context);
  session.end_agents();
  if (options.mpi) doctor_facts.own_mpirun = process::run_tool({process::find_tool("mpirun"), {"mpirun", "--version"}});
  const std::vector<Finding> findings = diagnose(doctor_facts);
  const std::string text = options.json ? to_json(findings)
                           : options.report
                               ? to_report(findings, describe_system(), output::last_fatal(base::Env::this_process()))
                               : to_table(findings);
  std::fputs(text.c_str(), stdout);
  return has_bad(findings) ? 1 : 0;
}

}  // namespace lockstep::launcher::doctor
