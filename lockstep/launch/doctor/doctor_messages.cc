#include "lockstep/launch/doctor/doctor_messages.h"

#include <algorithm>
#include <bit>

#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/base/parse.h"
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
template <typename Found, typename Each>
void each_text(Found& found, const Each& each) {
  for (auto* text : {&found.program.path, &found.program.error, &found.program.hash, &found.program.loader,
                     &found.program.python, &found.limited_by, &found.orted, &found.transparent_huge_pages})
    each(*text);
}

template <typename Found, typename Each>
void each_tool(Found& found, const Each& each) {
  for (auto* tool : {&found.libraries, &found.python, &found.probe, &found.smi, &found.resolved, &found.mpirun})
    each(*tool);
}

template <typename Found, typename Each>
void each_size(Found& found, const Each& each) {
  for (auto* number :
       {&found.memory_bytes, &found.available_bytes, &found.shm_bytes, &found.shm_free_bytes, &found.files_soft,
        &found.files_hard, &found.huge_pages, &found.huge_pages_free, &found.huge_page_bytes})
    each(*number);
}

}  // namespace

std::string encode_examine(const ExamineOrder& order) {
  std::string bytes;
  put_texts(bytes, order.command);
  put_text(bytes, order.directory);
  put(bytes, static_cast<std::uint8_t>(order.add_to_own));
  put_texts(bytes, order.environment);
  put(bytes, static_cast<std::uint8_t>(order.mpi));
  return bytes;
}

ExamineOrder decode_examine(std::string_view bytes) {
  Parser parser(bytes);
  ExamineOrder order;
  order.command = parser.texts();
  order.directory = parser.text();
  order.add_to_own = parser.number<std::uint8_t>() != 0;
  order.environment = parser.texts();
  order.mpi = parser.number<std::uint8_t>() != 0;
  parser.end();
  return order;
}

std::string encode_examined(const Examination& found) {
  std::string bytes;
  each_text(found, [&](const std::string& text) { put_text(bytes, text); });
  each_size(found, [&](std::uint64_t number) { put(bytes, number); });
  each_tool(found, [&](const ToolSaid& tool) {
    put_text(bytes, tool.path);
    put(bytes, static_cast<std::int32_t>(tool.code));
    put_text(bytes, tool.out);
    put_text(bytes, tool.err);
  });
  put(bytes, static_cast<std::int64_t>(found.memlock_bytes));
  put(bytes, static_cast<std::int32_t>(found.cpus_online));
  put(bytes, static_cast<std::uint8_t>(found.infiniband));
  put(bytes, std::bit_cast<std::uint64_t>(found.copy_bytes_per_s));
  put(bytes, static_cast<std::uint32_t>(found.addresses.size()));
  for (const base::InterfaceAddress& one : found.addresses) {
    put_text(bytes, one.interface);
    put_text(bytes, one.address);
    put(bytes, static_cast<std::uint8_t>(one.loopback));
  }
  return bytes;
}

Examination decode_examined(std::string_view bytes) {
  Parser parser(bytes);
  Examination found;
  each_text(found, [&](std::string& text) { text = base::printable(parser.text()); });
  each_size(found, [&](std::uint64_t& number) { number = parser.number<std::uint64_t>(); });
  each_tool(found, [&](ToolSaid& tool) {
    tool.path = base::printable(parser.text());
    tool.code = parser.number<std::int32_t>();
    tool.out = printable_lines(parser.text());
    tool.err = printable_lines(parser.text());
  });
  found.memlock_bytes = parser.number<std::int64_t>();
  found.cpus_online = parser.number<std::int32_t>();
  found.infiniband = parser.number<std::uint8_t>() != 0;
  found.copy_bytes_per_s = std::bit_cast<double>(parser.number<std::uint64_t>());
  found.addresses.resize(parser.count(9));
  for (base::InterfaceAddress& one : found.addresses) {
    one.interface = base::printable(parser.text());
    one.address = base::printable(parser.text());
    one.loopback = parser.number<std::uint8_t>() != 0;
  }
  parser.end();
  return found;
}

std::string encode_listen(const ListenOrder& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.self));
  put(bytes, static_cast<std::int32_t>(order.caller));
  put_text(bytes, order.token);
  put_text(bytes, order.host);
  return bytes;
}

ListenOrder decode_listen(std::string_view bytes) {
  Parser parser(bytes);
  ListenOrder order;
  order.self = parser.number<std::int32_t>();
  order.caller = parser.number<std::int32_t>();
  order.token = parser.text();
  order.host = parser.text();
  parser.end();
  return order;
}

std::string encode_listening(const ListenReply& reply) {
  std::string bytes;
  put_text(bytes, reply.address.host);
  put(bytes, reply.address.port);
  put_text(bytes, reply.error);
  return bytes;
}

ListenReply decode_listening(std::string_view bytes) {
  Parser parser(bytes);
  ListenReply reply;
  reply.address.host = base::printable(parser.text());
  reply.address.port = parser.number<std::uint16_t>();
  reply.error = base::printable(parser.text());
  parser.end();
  return reply;
}

std::string encode_measure(const MeasureOrder& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.self));
  put(bytes, static_cast<std::int32_t>(order.peer));
  put_text(bytes, order.token);
  put_text(bytes, order.address.host);
  put(bytes, order.address.port);
  return bytes;
}

MeasureOrder decode_measure(std::string_view bytes) {
  Parser parser(bytes);
  MeasureOrder order;
  order.self = parser.number<std::int32_t>();
  order.peer = parser.number<std::int32_t>();
  order.token = parser.text();
  order.address.host = base::printable(parser.text());
  order.address.port = parser.number<std::uint16_t>();
  parser.end();
  return order;
}

std::string encode_measured(const PairSpeed& speed) {
  std::string bytes;
  put(bytes, speed.round_trip_ns);
  put(bytes, speed.bytes);
  put(bytes, speed.ns);
  put_text(bytes, speed.error);
  return bytes;
}

PairSpeed decode_measured(std::string_view bytes) {
  Parser parser(bytes);
  PairSpeed speed;
  speed.round_trip_ns = parser.number<std::int64_t>();
  speed.bytes = parser.number<std::uint64_t>();
  speed.ns = parser.number<std::int64_t>();
  speed.error = base::printable(parser.text());
  parser.end();
  return speed;
}

}  // namespace lockstep::launcher
