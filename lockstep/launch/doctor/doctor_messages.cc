#include "lockstep/launch/doctor/doctor_messages.h"

#include <algorithm>
#include <bit>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::doctor {
namespace {

std::string printable_lines(std::string_view text) {
  std::string all;
  for (std::string line : base::split(text, '\n')) {
    std::replace(line.begin(), line.end(), '\t', ' ');
    all += (all.empty() ? "" : "\n") + base::telemetry::printable(line);
  }
  return all;
}

/// Calls `each` for every text field in the order of encoding. Encoding and decoding both use it.
template <typename Facts, typename Each>
void each_text(Facts& facts, const Each& each) {
  for (auto* text : {&facts.program.path, &facts.program.error, &facts.program.hash, &facts.program.loader,
                     &facts.program.python, &facts.memory_cgroup, &facts.orted, &facts.transparent_huge_pages})
    each(*text);
}

template <typename Facts, typename Each>
void each_tool(Facts& facts, const Each& each) {
  for (auto* tool : {&facts.libraries, &facts.python, &facts.probe, &facts.nvidia_smi, &facts.resolved, &facts.mpirun})
    each(*tool);
}

template <typename Facts, typename Each>
void each_size(Facts& facts, const Each& each) {
  for (auto* number :
       {&facts.memory_bytes, &facts.available_bytes, &facts.shm_bytes, &facts.shm_free_bytes, &facts.files_soft,
        &facts.files_hard, &facts.huge_pages, &facts.huge_pages_free, &facts.huge_page_bytes})
    each(*number);
}

}  // namespace

std::string encode_host_facts_request(const HostFactsRequest& request) {
  std::string bytes;
  base::put_texts(bytes, request.command);
  base::put_text(bytes, request.directory);
  base::put_number(bytes, static_cast<std::uint8_t>(request.extends_own_environment));
  base::put_texts(bytes, request.environment);
  base::put_number(bytes, static_cast<std::uint8_t>(request.mpi));
  return bytes;
}

HostFactsRequest decode_host_facts_request(std::string_view bytes) {
  base::ByteReader reader(bytes, protocol::kProtocolSubject);
  HostFactsRequest request;
  request.command = reader.texts();
  request.directory = reader.text();
  request.extends_own_environment = reader.number<std::uint8_t>() != 0;
  request.environment = reader.texts();
  request.mpi = reader.number<std::uint8_t>() != 0;
  reader.end();
  return request;
}

std::string encode_host_facts(const HostFacts& facts) {
  std::string bytes;
  each_text(facts, [&](const std::string& text) { base::put_text(bytes, text); });
  each_size(facts, [&](std::uint64_t number) { base::put_number(bytes, number); });
  each_tool(facts, [&](const process::ToolResult& tool) {
    base::put_text(bytes, tool.path);
    base::put_number(bytes, static_cast<std::int32_t>(tool.code));
    base::put_text(bytes, tool.out);
    base::put_text(bytes, tool.err);
  });
  base::put_number(bytes, static_cast<std::int64_t>(facts.memlock_bytes));
  base::put_number(bytes, static_cast<std::int32_t>(facts.cpus_online));
  base::put_number(bytes, static_cast<std::uint8_t>(facts.infiniband));
  base::put_number(bytes, std::bit_cast<std::uint64_t>(facts.copy_bytes_per_s));
  base::put_number(bytes, static_cast<std::uint32_t>(facts.addresses.size()));
  for (const base::net::InterfaceAddress& one : facts.addresses) {
    base::put_text(bytes, one.interface);
    base::put_text(bytes, one.address);
    base::put_number(bytes, static_cast<std::uint8_t>(one.loopback));
  }
  return bytes;
}

HostFacts decode_host_facts(std::string_view bytes) {
  base::ByteReader reader(bytes, protocol::kProtocolSubject);
  HostFacts facts;
  each_text(facts, [&](std::string& text) { text = base::telemetry::printable(reader.text()); });
  each_size(facts, [&](std::uint64_t& number) { number = reader.number<std::uint64_t>(); });
  each_tool(facts, [&](process::ToolResult& tool) {
    tool.path = base::telemetry::printable(reader.text());
    tool.code = reader.number<std::int32_t>();
    tool.out = printable_lines(reader.text());
    tool.err = printable_lines(reader.text());
  });
  facts.memlock_bytes = reader.number<std::int64_t>();
  facts.cpus_online = reader.number<std::int32_t>();
  facts.infiniband = reader.number<std::uint8_t>() != 0;
  facts.copy_bytes_per_s = std::bit_cast<double>(reader.number<std::uint64_t>());
  facts.addresses.resize(reader.count(9));
  for (base::net::InterfaceAddress& one : facts.addresses) {
    one.interface = base::telemetry::printable(reader.text());
    one.address = base::telemetry::printable(reader.text());
    one.loopback = reader.number<std::uint8_t>() != 0;
  }
  reader.end();
  return facts;
}

std::string encode_listen_request(const ListenRequest& request) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::int32_t>(request.self));
  base::put_number(bytes, static_cast<std::int32_t>(request.caller));
  base::put_text(bytes, request.token);
  base::put_text(bytes, request.host);
  return bytes;
}

ListenRequest decode_listen_request(std::string_view bytes) {
  base::ByteReader reader(bytes, protocol::kProtocolSubject);
  ListenRequest request;
  request.self = reader.number<std::int32_t>();
  request.caller = reader.number<std::int32_t>();
  request.token = reader.text();
  request.host = reader.text();
  reader.end();
  return request;
}

std::string encode_listen_reply(const ListenReply& reply) {
  std::string bytes;
  base::put_text(bytes, reply.address.host);
  base::put_number(bytes, reply.address.port);
  base::put_text(bytes, reply.error);
  return bytes;
}

ListenReply decode_listen_reply(std::string_view bytes) {
  base::ByteReader reader(bytes, protocol::kProtocolSubject);
  ListenReply reply;
  reply.address.host = base::telemetry::printable(reader.text());
  reply.address.port = reader.number<std::uint16_t>();
  reply.error = base::telemetry::printable(reader.text());
  reader.end();
  return reply;
}

std::string encode_measure_request(const MeasureRequest& request) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::int32_t>(request.self));
  base::put_number(bytes, static_cast<std::int32_t>(request.peer));
  base::put_text(bytes, request.token);
  base::put_text(bytes, request.address.host);
  base::put_number(bytes, request.address.port);
  return bytes;
}

MeasureRequest decode_measure_request(std::string_view bytes) {
  base::ByteReader reader(bytes, protocol::kProtocolSubject);
  MeasureRequest request;
  request.self = reader.number<std::int32_t>();
  request.peer = reader.number<std::int32_t>();
  request.token = reader.text();
  request.address.host = base::telemetry::printable(reader.text());
  request.address.port = reader.number<std::uint16_t>();
  reader.end();
  return request;
}

std::string encode_link_speed(const LinkSpeed& speed) {
  std::string bytes;
  base::put_number(bytes, speed.round_trip_ns);
  base::put_number(bytes, speed.bytes);
  base::put_number(bytes, speed.ns);
  base::put_text(bytes, speed.error);
  return bytes;
}

LinkSpeed decode_link_speed(std::string_view bytes) {
  base::ByteReader reader(bytes, protocol::kProtocolSubject);
  LinkSpeed speed;
  speed.round_trip_ns = reader.number<std::int64_t>();
  speed.bytes = reader.number<std::uint64_t>();
  speed.ns = reader.number<std::int64_t>();
  speed.error = base::telemetry::printable(reader.text());
  reader.end();
  return speed;
}

}  // namespace lockstep::launcher::doctor
