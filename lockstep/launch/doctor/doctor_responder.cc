#include "lockstep/launch/doctor/doctor_responder.h"

#include <poll.h>

#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/base/net/connectivity_probe.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/doctor/doctor_messages.h"

namespace lockstep::launcher::doctor {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

/// Polls the connections of `connectivity` once, and the descriptor `also` unless it is -1. Returns false if `also` is
/// readable or the deadline has passed.
bool poll_once(base::net::ConnectivityProbe& connectivity, int also, Deadline deadline) {
  std::vector<pollfd> entries = connectivity.entries();
  entries.push_back({also, POLLIN, 0});
  ::poll(entries.data(), entries.size(), deadline.poll_ms());
  const bool has_input = entries.back().revents != 0;
  entries.pop_back();
  connectivity.handle(entries);
  return !has_input && !deadline.expired();
}

}  // namespace

void DoctorResponder::listen(const std::string& payload) const {
  const ListenRequest request = protocol::decoded<ListenRequest>(payload);
  base::net::ConnectivityProbe connectivity(request.self, request.token);
  ListenReply reply;
  try {
    reply.address = connectivity.listen(request.host);
  } catch (const base::Error& error) {
    reply.error = error.what();
  }
  send_(protocol::FrameKind::kListenReply, protocol::encoded(reply));
  if (!reply.error.empty()) return;
  base::Fd caller;
  const Deadline deadline = Deadline::in(base::kAgentConnectTimeout);
  do caller = connectivity.take_incoming(request.caller, 0, 0);
  while (!caller && poll_once(connectivity, input_, deadline));
  if (!caller) return;
  try {
    serve_link(caller.get(), Deadline::in(base::kLinkMeasureTimeout));
  } catch (const base::Error&) {
    // The connecting host reports the error.
  }
}

void DoctorResponder::measure(const std::string& payload) const {
  const MeasureRequest request = protocol::decoded<MeasureRequest>(payload);
  LinkSpeed speed;
  try {
    base::net::ConnectivityProbe connectivity(request.self, request.token);
    connectivity.connect_to(request.address, request.peer);
    const Deadline deadline = Deadline::in(base::kAgentConnectTimeout);
    while (!connectivity.all_decided() && poll_once(connectivity, -1, deadline)) {
    }
    connectivity.fail_undecided();
    base::net::ConnectivityProbe::Outgoing& outgoing = connectivity.outgoing().front();
    if (outgoing.fd)
      speed = measure_link(outgoing.fd.get(), Deadline::in(base::kLinkMeasureTimeout));
    else
      speed.error = outgoing.error;
  } catch (const base::Error& error) {
    speed.error = error.what();
  }
  send_(protocol::FrameKind::kLinkSpeed, protocol::encoded(speed));
}

void DoctorResponder::handle(const protocol::Frame& frame) const {
  switch (frame.kind) {
    case protocol::FrameKind::kClockRequest: {
      const auto now = std::chrono::system_clock::now().time_since_epoch();
      return send_(protocol::FrameKind::kClockReply,
                   protocol::encode_numbers({std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()}));
    }
    case protocol::FrameKind::kHostFactsRequest:
      return send_(protocol::FrameKind::kHostFacts,
                   encode_host_facts(collect_host_facts(protocol::decoded<HostFactsRequest>(frame.payload), input_)));
    case protocol::FrameKind::kListenRequest: return listen(frame.payload);
    case protocol::FrameKind::kMeasureRequest: return measure(frame.payload);
    default: protocol::throw_unexpected(frame.kind);
  }
}

}  // namespace lockstep::launcher::doctor
