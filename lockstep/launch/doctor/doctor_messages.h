// The encoding of the payloads of the frames of `lockstep doctor`. As in frames.h, decoding throws Error kProtocol for
// anything that encoding does not write, and makes the texts of hosts printable.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/doctor/link_speed.h"
#include "lockstep/launch/protocol/message_codec.h"

namespace lockstep::launcher::doctor {

using protocol::Is;
using protocol::Raw;

void fields(Is<HostFactsRequest> auto& request, auto& field) {
  field(Raw{request.command});
  field(Raw{request.directory});
  field(request.extends_own_environment);
  field(Raw{request.environment});
  field(request.mpi);
}

/// Decoding keeps line breaks in the output of tools.
std::string encode_host_facts(const HostFacts& facts);
HostFacts decode_host_facts(std::string_view bytes);

void fields(Is<ListenRequest> auto& request, auto& field) {
  field(request.self);
  field(request.caller);
  field(Raw{request.token});
  field(Raw{request.host});
}

void fields(Is<ListenReply> auto& reply, auto& field) {
  field(reply.address);
  field(reply.error);
}

void fields(Is<MeasureRequest> auto& request, auto& field) {
  field(request.self);
  field(request.peer);
  field(Raw{request.token});
  field(request.address);
}

void fields(Is<LinkSpeed> auto& speed, auto& field) {
  field(speed.round_trip_ns);
  field(speed.bytes);
  field(speed.ns);
  field(speed.error);
}

}  // namespace lockstep::launcher::doctor
