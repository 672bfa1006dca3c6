#include "lockstep/launch/agent/agent_setup.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/connectivity_probe.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/doctor/doctor_responder.h"
#include "lockstep/launch/hosts/network_check.h"
#include "lockstep/launch/process/process.h"

namespace lockstep::launcher::agent {
namespace {

using base::Deadline;

/// Waits for the agent. Kills it if it still runs base::kGuardTimeout after the end of its channel, because it is
/// stopped or blocked in the kernel.
void watch_agent(pid_t agent, int channel, int signals, int& status) {
  Deadline ends_by = Deadline::never();  // bounded: by the end of the channel
  while (::waitpid(agent, &status, WNOHANG) == 0) {
    pollfd entries[] = {{ends_by.is_never() ? channel : -1, POLLRDHUP, 0}, {signals, POLLIN, 0}};
    ::poll(entries, 2, ends_by.poll_ms());
    while (process::read_signal(signals)) {
    }
    if (entries[0].revents) ends_by = Deadline::in(base::kGuardTimeout);
    if (!ends_by.expired()) continue;
    ::kill(agent, SIGKILL);
    ends_by = Deadline::in(base::kGuardTimeout);
  }
}

using namespace std::chrono_literals;

struct LauncherLost {};

void send_frame(protocol::FrameKind kind, const std::string& payload) {
  if (!base::write_all(STDOUT_FILENO, protocol::encode({kind, -1, payload}))) throw LauncherLost();
}

bool same_family(const std::string& a, const std::string& b) {
  return (a.find(':') == std::string::npos) == (b.find(':') == std::string::npos);
}

/// The agent's side of check_network().
class NetworkResponder {
 public:
  std::vector<pollfd> entries() const { return connectivity_ ? connectivity_->entries() : std::vector<pollfd>(); }
  void handle(const std::vector<pollfd>& entries) {
    if (connectivity_) connectivity_->handle(entries);
  }

  void find_routes(protocol::RouteRequest request) {
    request_ = std::move(request);
    base::net::set_host_timeout(std::chrono::milliseconds(request_.host_timeout_ms));
    own_addresses_ = hosts::reachable_addresses(base::net::interface_addresses());
    connectivity_.emplace(request_.self, request_.token);
    const cli::InterfaceFilter filter = request_.interface.empty()
                                            ? cli::InterfaceFilter()
                                            : cli::parse_interface_filter("--interface", request_.interface);
    for (std::size_t i = 0; i < request_.launcher.size(); ++i) {
      std::vector<std::string> sources = filter ? std::vector<std::string>() : std::vector<std::string>{""};
      for (const base::net::InterfaceAddress& own : own_addresses_)
        if (filter && same_family(own.address, request_.launcher[i].host) &&
            cli::allows(filter, own.interface, own.address))
          sources.push_back(own.address);
      for (const std::string& source : sources) {
        attempts_.push_back({static_cast<int>(i), connectivity_->outgoing().size()});
        connectivity_->connect_to(request_.launcher[i], -1, source);
      }
    }
    phase_ = Phase::kFindingRoutes;
    deadline_ = Deadline::in(base::kAgentConnectTimeout);
  }

  void probe_peers(const protocol::ProbeRequest& request) {
    if (!connectivity_) throw base::Error(base::Cause::kProtocol, "a probe request before the route request");
    for (const RouteAttempt& attempt : attempts_)
      if (attempt.launcher == request.launcher && !liveness_fd_ && connectivity_->outgoing()[attempt.outgoing].fd)
        liveness_fd_ = std::move(connectivity_->outgoing()[attempt.outgoing].fd);
    first_probe_ = connectivity_->outgoing().size();
    base::raise_fd_limit(2 * request.peers.size() + 64);
    for (const protocol::ProbePeer& peer : request.peers) connectivity_->connect_to(peer.address, peer.node);
    probed_ = request.peers;
    phase_ = Phase::kProbing;
    deadline_ = Deadline::in(base::kAgentConnectTimeout);
  }

  Deadline deadline() const { return deadline_; }
  /// Sends the reply if it is complete or its deadline has passed.
  void answer_when_due() {
    if (phase_ == Phase::kIdle) return;
    const auto& outgoing = connectivity_->outgoing();
    if (phase_ == Phase::kFindingRoutes &&
        std::ranges::any_of(outgoing, [](const auto& link) { return link.fd && link.decided; }))
      deadline_ = earlier(deadline_, Deadline::in(base::kMoreRoutesWait));
    if (!connectivity_->all_decided() && !deadline_.expired()) return;
    connectivity_->fail_undecided();
    if (phase_ == Phase::kFindingRoutes)
      send_routes();
    else
      send_probe_failures();
    phase_ = Phase::kIdle;
    deadline_ = Deadline::never();  // bounded: no request is in progress
  }

  base::Fd take_liveness_fd() { return std::move(liveness_fd_); }

 private:
  struct RouteAttempt {
    int launcher = 0;
    std::size_t outgoing = 0;
  };

  void send_routes() {
    protocol::RouteReply reply;
    std::string tried;
    for (const RouteAttempt& attempt : attempts_) {
      const base::net::ConnectivityProbe::Outgoing& outgoing = connectivity_->outgoing()[attempt.outgoing];
      const std::string& target = request_.launcher[static_cast<std::size_t>(attempt.launcher)].host;
      if (!outgoing.fd) {
        tried += (tried.empty() ? "" : "; ") + target + ": " + outgoing.error;
        continue;
      }
      const auto own = std::ranges::find(own_addresses_, outgoing.from, &base::net::InterfaceAddress::address);
      reply.routes.push_back({attempt.launcher, static_cast<std::uint32_t>(attempt.outgoing),
                              connectivity_->listen(outgoing.from), own == own_addresses_.end() ? "" : own->interface});
    }
    if (reply.routes.empty())
      reply.error =
          (attempts_.empty() ? "none of its addresses matches --interface " + base::quoted(request_.interface, 80)
                             : tried) +
          "; its addresses are " +
          base::joined(own_addresses_, ", ", [](const auto& own) { return own.interface + " " + own.address; });
    send_frame(protocol::FrameKind::kRouteReply, protocol::encoded(reply));
  }

  void send_probe_failures() {
    protocol::ProbeReply failures;
    for (std::size_t i = first_probe_; i < connectivity_->outgoing().size(); ++i) {
      base::net::ConnectivityProbe::Outgoing& outgoing = connectivity_->outgoing()[i];
      if (!outgoing.fd) failures.push_back({probed_[i - first_probe_].node, outgoing.error});
      outgoing.fd.reset();
    }
    send_frame(protocol::FrameKind::kProbeReply, protocol::encoded(failures));
  }

  enum class Phase { kIdle, kFindingRoutes, kProbing } phase_ = Phase::kIdle;
  protocol::RouteRequest request_;
  std::vector<base::net::InterfaceAddress> own_addresses_;
  std::vector<RouteAttempt> attempts_;
  std::optional<base::net::ConnectivityProbe> connectivity_;
  std::vector<protocol::ProbePeer> probed_;
  std::size_t first_probe_ = 0;  // index in connectivity_->outgoing() of the first of them
  base::Fd liveness_fd_;
  Deadline deadline_ = Deadline::never();
};

}  // namespace

void fork_guarded_agent() {
  process::become_subreaper();
  const pid_t agent = ::fork();
  if (agent < 0) throw base::SystemError("cannot start the agent", errno);
  if (agent == 0) return;
  const base::Fd signals = process::make_signal_fd({SIGCHLD});
  const base::Fd channel(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  // Only the agent uses stdin and stdout.
  const base::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO}) ::dup2(null.get(), fd);
  int status = 0;
  watch_agent(agent, channel.get(), signals.get(), status);
  process::kill_descendants({}, Deadline::in(base::kUnkillableTimeout));
  ::_exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

std::string_view find_foreign_library(const std::vector<pid_t>& pids) {
  for (const pid_t pid : pids) {
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    for (std::string mapping; std::getline(maps, mapping);) {
      if (mapping.find("/mpi4py/MPI.") != std::string::npos) return "mpi4py";
      // horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so; tensorflow/mpi_lib and mxnet/mpi_lib
      const std::size_t package = mapping.find("/horovod/");
      if (package != std::string::npos && mapping.find("/mpi_lib", package) != std::string::npos) return "Horovod";
    }
  }
  return "";
}

void check_interfaces(const process::Environment& environment) {
  std::vector<std::string> names;
  for (const base::net::InterfaceAddress& address : base::net::interface_addresses())
    if (std::ranges::find(names, address.interface) == names.end()) names.push_back(address.interface);
  for (const std::string& variable : environment)
    for (const std::string name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
      const std::string error = variable.rfind(name + "=", 0) == 0
                                    ? cli::socket_ifname_error(name, variable.substr(name.size() + 1), names)
                                    : "";
      if (!error.empty())
        throw base::UsageError(error,
                               "unset it: lockstep then sets the interface through which the hosts reach each other");
    }
}

std::optional<AgentSetup> set_up_agent(protocol::FrameReader& input) try {
  AgentSetup setup;
  setup.master_port = base::net::reserve_port({"0.0.0.0", 0});  // not listening; torch.distributed binds it as well
  plan::HostInfo info = plan::collect_host_info();
  info.master_port = base::net::local_address(setup.master_port.get()).port;
  send_frame(protocol::FrameKind::kHostInfo, protocol::encode_host_info(info));

  NetworkResponder responder;
  doctor::DoctorResponder doctor(send_frame, STDIN_FILENO);
  const Deadline deadline = Deadline::in(base::kJobTimeout);
  char bytes[1 << 16];
  for (;;) {
    std::vector<pollfd> entries = responder.entries();
    entries.push_back({STDIN_FILENO, POLLIN, 0});
    ::poll(entries.data(), entries.size(), earlier(deadline, responder.deadline()).poll_ms());
    if (deadline.expired())
      throw base::Error(base::Cause::kProtocol, "the agent received no job within " +
                                                    std::to_string(base::kJobTimeout / std::chrono::minutes(1)) +
                                                    " minutes");
    const bool has_input = entries.back().revents != 0;
    entries.pop_back();
    responder.handle(entries);
    responder.answer_when_due();
    if (!has_input) continue;
    const ssize_t size = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (size == 0) throw LauncherLost();
    if (size > 0) input.feed({bytes, static_cast<std::size_t>(size)});
    while (const auto frame = input.next()) {
      switch (frame->kind) {
        case protocol::FrameKind::kRouteRequest:
          responder.find_routes(protocol::decode_route_request(frame->payload));
          break;
        case protocol::FrameKind::kProbeRequest:
          responder.probe_peers(protocol::decoded<protocol::ProbeRequest>(frame->payload));
          break;
        case protocol::FrameKind::kJob:
          setup.job = protocol::decode_job(frame->payload);
          setup.liveness_fd = responder.take_liveness_fd();
          return setup;
        case protocol::FrameKind::kClockRequest:
        case protocol::FrameKind::kHostFactsRequest:
        case protocol::FrameKind::kListenRequest:
        case protocol::FrameKind::kMeasureRequest: doctor.handle(*frame); break;
        default: protocol::throw_unexpected(frame->kind);
      }
    }
  }
} catch (const LauncherLost&) {
  return std::nullopt;
}

}  // namespace lockstep::launcher::agent
