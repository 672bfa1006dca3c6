#include "lockstep/launch/doctor/doctor_messages.h"

#include <algorithm>
#include <array>

#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/launch/protocol/message_codec.h"

namespace lockstep::launcher::doctor {

using protocol::decoded;
using protocol::encoded;
using protocol::Is;
using protocol::Raw;

namespace {

std::string printable_lines(std::string_view text) {
  std::string all;
  for (std::string line : base::split(text, '\n')) {
    std::replace(line.begin(), line.end(), '\t', ' ');
    all += (all.empty() ? "" : "\n") + base::telemetry::printable(line);
  }
  return all;
}

}  // namespace

void fields(Is<HostFactsRequest> auto& request, auto& field) {
  field(Raw{request.command});
  field(Raw{request.directory});
  field(request.extends_own_environment);
  field(Raw{request.environment});
  field(request.mpi);
}

std::string encode_host_facts_request(const HostFactsRequest& request) { return encoded(request); }
HostFactsRequest decode_host_facts_request(std::string_view bytes) { return decoded<HostFactsRequest>(bytes); }

void fields(Is<ProgramFile> auto& program, auto& field) {
  field(program.path);
  field(program.error);
  field(program.hash);
  field(program.loader);
  field(program.python);
}

/// The output keeps its lines.
void tool_fields(Is<process::ToolResult> auto& tool, auto& field) {
  field(tool.path);
  field(tool.code);
  field(Raw{tool.out});
  field(Raw{tool.err});
}

auto tools_of(auto& facts) {
  return std::array{&facts.libraries, &facts.python, &facts.probe, &facts.nvidia_smi, &facts.resolved, &facts.mpirun};
}

void fields(Is<HostFacts> auto& facts, auto& field) {
  field(facts.program);
  for (auto* tool : tools_of(facts)) tool_fields(*tool, field);
  field(facts.orted);
  field(facts.cpus_online);
  field(facts.memory_bytes);
  field(facts.available_bytes);
  field(facts.memory_cgroup);
  field(facts.shm_bytes);
  field(facts.shm_free_bytes);
  field(facts.memlock_bytes);
  field(facts.files_soft);
  field(facts.files_hard);
  field(facts.infiniband);
  field(facts.huge_pages);
  field(facts.huge_pages_free);
  field(facts.huge_page_bytes);
  field(facts.transparent_huge_pages);
  field(facts.copy_bytes_per_s);
  field(facts.addresses);
}

std::string encode_host_facts(const HostFacts& facts) { return encoded(facts); }

HostFacts decode_host_facts(std::string_view bytes) {
  HostFacts facts = decoded<HostFacts>(bytes);
  for (process::ToolResult* tool : tools_of(facts))
    for (std::string* text : {&tool->out, &tool->err}) *text = printable_lines(*text);
  return facts;
}

void fields(Is<ListenRequest> auto& request, auto& field) {
  field(request.self);
  field(request.caller);
  field(Raw{request.token});
  field(Raw{request.host});
}

std::string encode_listen_request(const ListenRequest& request) { return encoded(request); }
ListenRequest decode_listen_request(std::string_view bytes) { return decoded<ListenRequest>(bytes); }

void fields(Is<ListenReply> auto& reply, auto& field) {
  field(reply.address);
  field(reply.error);
}

std::string encode_listen_reply(const ListenReply& reply) { return encoded(reply); }
ListenReply decode_listen_reply(std::string_view bytes) { return decoded<ListenReply>(bytes); }

void fields(Is<MeasureRequest> auto& request, auto& field) {
  field(request.self);
  field(request.peer);
  field(Raw{request.token});
  field(request.address);
}

std::string encode_measure_request(const MeasureRequest& request) { return encoded(request); }
MeasureRequest decode_measure_request(std::string_view bytes) { return decoded<MeasureRequest>(bytes); }

void fields(Is<LinkSpeed> auto& speed, auto& field) {
  field(speed.round_trip_ns);
  field(speed.bytes);
  field(speed.ns);
  field(speed.error);
}

std::string encode_link_speed(const LinkSpeed& speed) { return encoded(speed); }
LinkSpeed decode_link_speed(std::string_view bytes) { return decoded<LinkSpeed>(bytes); }

}  // namespace lockstep::launcher::doctor
