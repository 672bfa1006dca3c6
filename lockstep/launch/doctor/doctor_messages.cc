#include "lockstep/launch/doctor/doctor_messages.h"

#include <algorithm>
#include <bit>

#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/launch/protocol/codec.h"

namespace lockstep::launcher {
namespace {

std::string printable_lines(const std::string& text) {
  std::string all;
  for (std::string line : base::split(text, '\n')) {
    std::replace(line.begin(), line.end(), '\t', ' ');
    all += (all.empty() ? "" : "\n") + base::printable(line);
  }
  return all;
}

/// The fields in their order, for both directions: `each` gets every one of them.
template <typename Facts, typename Each>
void each_text(Facts& facts, const Each& each) {
  for (auto* text : {&facts.program.path, &facts.program.error, &facts.program.hash, &facts.program.loader,
                     &facts.program.python, &facts.limited_by, &facts.orted, &facts.transparent_huge_pages})
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

std::string encode_host_facts_request(const HostFactsRequest& order) {
  std::string bytes;
  put_texts(bytes, order.command);
  put_text(bytes, order.directory);
  put(bytes, static_cast<std::uint8_t>(order.extends_own_environment));
  put_texts(bytes, order.environment);
  put(bytes, static_cast<std::uint8_t>(order.mpi));
  return bytes;
}

HostFactsRequest decode_host_facts_request(std::string_view bytes) {
  PayloadReader parser(bytes);
  HostFactsRequest order;
  order.command = parser.texts();
  order.directory = parser.text();
  order.extends_own_environment = parser.number<std::uint8_t>() != 0;
  order.environment = parser.texts();
  order.mpi = parser.number<std::uint8_t>() != 0;
  parser.end();
  return order;
}

std::string encode_host_facts(const HostFacts& facts) {
  std::string bytes;
  each_text(facts, [&](const std::string& text) { put_text(bytes, text); });
  each_size(facts, [&](std::uint64_t number) { put(bytes, number); });
  each_tool(facts, [&](const ToolResult& tool) {
    put_text(bytes, tool.path);
    put(bytes, static_cast<std::int32_t>(tool.code));
    put_text(bytes, tool.out);
    put_text(bytes, tool.err);
  });
  put(bytes, static_cast<std::int64_t>(facts.memlock_bytes));
  put(bytes, static_cast<std::int32_t>(facts.cpus_online));
  put(bytes, static_cast<std::uint8_t>(facts.infiniband));
  put(bytes, std::bit_cast<std::uint64_t>(facts.copy_bytes_per_s));
  put(bytes, static_cast<std::uint32_t>(facts.addresses.size()));
  for (const base::InterfaceAddress& one : facts.addresses) {
    put_text(bytes, one.interface);
    put_text(bytes, one.address);
    put(bytes, static_cast<std::uint8_t>(one.loopback));
  }
  return bytes;
}

HostFacts decode_host_facts(std::string_view bytes) {
  PayloadReader parser(bytes);
  HostFacts facts;
  each_text(facts, [&](std::string& text) { text = base::printable(parser.text()); });
  each_size(facts, [&](std::uint64_t& number) { number = parser.number<std::uint64_t>(); });
  each_tool(facts, [&](ToolResult& tool) {
    tool.path = base::printable(parser.text());
    tool.code = parser.number<std::int32_t>();
    tool.out = printable_lines(parser.text());
    tool.err = printable_lines(parser.text());
  });
  facts.memlock_bytes = parser.number<std::int64_t>();
  facts.cpus_online = parser.number<std::int32_t>();
  facts.infiniband = parser.number<std::uint8_t>() != 0;
  facts.copy_bytes_per_s = std::bit_cast<double>(parser.number<std::uint64_t>());
  facts.addresses.resize(parser.count(9));
  for (base::InterfaceAddress& one : facts.addresses) {
    one.interface = base::printable(parser.text());
    one.address = base::printable(parser.text());
    one.loopback = parser.number<std::uint8_t>() != 0;
  }
  parser.end();
  return facts;
}

std::string encode_listen_request(const ListenRequest& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.self));
  put(bytes, static_cast<std::int32_t>(order.caller));
  put_text(bytes, order.token);
  put_text(bytes, order.host);
  return bytes;
}

ListenRequest decode_listen_request(std::string_view bytes) {
  PayloadReader parser(bytes);
  ListenRequest order;
  order.self = parser.number<std::int32_t>();
  order.caller = parser.number<std::int32_t>();
  order.token = parser.text();
  order.host = parser.text();
  parser.end();
  return order;
}

std::string encode_listen_reply(const ListenReply& reply) {
  std::string bytes;
  put_text(bytes, reply.address.host);
  put(bytes, reply.address.port);
  put_text(bytes, reply.error);
  return bytes;
}

ListenReply decode_listen_reply(std::string_view bytes) {
  PayloadReader parser(bytes);
  ListenReply reply;
  reply.address.host = base::printable(parser.text());
  reply.address.port = parser.number<std::uint16_t>();
  reply.error = base::printable(parser.text());
  parser.end();
  return reply;
}

std::string encode_measure_request(const MeasureRequest& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.self));
  put(bytes, static_cast<std::int32_t>(order.peer));
  put_text(bytes, order.token);
  put_text(bytes, order.address.host);
  put(bytes, order.address.port);
  return bytes;
}

MeasureRequest decode_measure_request(std::string_view bytes) {
  PayloadReader parser(bytes);
  MeasureRequest order;
  order.self = parser.number<std::int32_t>();
  order.peer = parser.number<std::int32_t>();
  order.token = parser.text();
  order.address.host = base::printable(parser.text());
  order.address.port = parser.number<std::uint16_t>();
  parser.end();
  return order;
}

std::string encode_link_speed(const LinkSpeed& speed) {
  std::string bytes;
  put(bytes, speed.round_trip_ns);
  put(bytes, speed.bytes);
  put(bytes, speed.ns);
  put_text(bytes, speed.error);
  return bytes;
}

LinkSpeed decode_link_speed(std::string_view bytes) {
  PayloadReader parser(bytes);
  LinkSpeed speed;
  speed.round_trip_ns = parser.number<std::int64_t>();
  speed.bytes = parser.number<std::uint64_t>();
  speed.ns = parser.number<std::int64_t>();
  speed.error = base::printable(parser.text());
  parser.end();
  return speed;
}

}  // namespace lockstep::launcher
