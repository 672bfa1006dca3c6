#include "lockstep/launch/protocol/frames.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/job/join.h"
#include "lockstep/launch/protocol/codec.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kHeaderBytes = 12;

}  // namespace

std::string encode(const Frame& frame) {
  std::string bytes;
  bytes.reserve(kHeaderBytes + frame.payload.size() + 1);
  put(bytes, static_cast<std::uint32_t>(frame.payload.size()));
  put(bytes, static_cast<std::uint32_t>(frame.kind));
  put(bytes, static_cast<std::int32_t>(frame.rank));
  bytes += frame.payload;
  return bytes += '\n';
}

std::optional<Frame> FrameReader::next() {
  const std::string_view rest = std::string_view(buffer_).substr(begin_);
  std::size_t length = 0;
  if (rest.size() >= kHeaderBytes) {
    PayloadReader header(rest);
    length = header.number<std::uint32_t>();
    const auto kind = header.number<std::uint32_t>();
    if (length > limit_)
      throw_protocol_error("a frame of " + std::to_string(length) + " bytes; allowed are " + std::to_string(limit_));
    if (kind < static_cast<std::uint32_t>(FrameKind::kJob) || kind > static_cast<std::uint32_t>(FrameKind::kDone))
      throw_protocol_error("a frame of kind " + std::to_string(kind));
    if (rest.size() > kHeaderBytes + length) {
      if (rest[kHeaderBytes + length] != '\n') throw_protocol_error("a frame without its last byte");
      begin_ += kHeaderBytes + length + 1;
      return Frame{static_cast<FrameKind>(kind), header.number<std::int32_t>(),
                   std::string(rest.substr(kHeaderBytes, length))};
    }
  }
  buffer_.erase(0, begin_);
  begin_ = 0;
  return std::nullopt;
}

std::string encode_numbers(const std::vector<std::int64_t>& numbers) {
  std::string bytes;
  for (const std::int64_t number : numbers) put(bytes, number);
  return bytes;
}

std::vector<std::int64_t> decode_numbers(std::string_view bytes, std::size_t count) {
  PayloadReader parser(bytes);
  std::vector<std::int64_t> numbers(count);
  for (std::int64_t& number : numbers) number = parser.number<std::int64_t>();
  parser.end();
  return numbers;
}

std::string encode_ranks(const std::vector<int>& ranks) { return encode_numbers({ranks.begin(), ranks.end()}); }

std::vector<int> decode_ranks(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, bytes.size() / sizeof(std::int64_t));
  return {numbers.begin(), numbers.end()};
}

std::string encode_stop(const StopRequest& stop) {
  return encode_numbers({stop.signal, stop.notice_period.count(), stop.grace.count()});
}

StopRequest decode_stop(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 3);
  return {static_cast<int>(numbers[0]), std::chrono::milliseconds(numbers[1]), std::chrono::milliseconds(numbers[2])};
}

std::string encode_rank_health(const job::RankHealth& pulse) {
  return encode_numbers({pulse.rank, pulse.since_heartbeat.count(), pulse.since_progress.count(), pulse.is_in_world,
                         pulse.process_state});
}

job::RankHealth decode_rank_health(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 5);
  return {.rank = static_cast<int>(numbers[0]),
          .since_heartbeat = std::chrono::milliseconds(numbers[1]),
          .since_progress = std::chrono::milliseconds(numbers[2]),
          .is_in_world = numbers[3] != 0,
          .state = static_cast<char>(numbers[4])};
}

namespace {

constexpr std::size_t kMaxPerKind = 32;  // operations that go on, and that have ended

void put_operation(std::string& out, const base::OperationRecord& operation) {
  for (const std::uint64_t number : {operation.number, operation.seq, operation.bytes}) put(out, number);
  for (const std::int64_t number : {operation.step, operation.started, operation.ended}) put(out, number);
  for (const std::string* text : {&operation.channel, &operation.kind, &operation.dtype, &operation.name})
    put_text(out, *text);
}

base::OperationRecord read_operation(PayloadReader& parser) {
  base::OperationRecord operation;
  for (std::uint64_t* number : {&operation.number, &operation.seq, &operation.bytes})
    *number = parser.number<std::uint64_t>();
  for (std::int64_t* number : {&operation.step, &operation.started, &operation.ended})
    *number = parser.number<std::int64_t>();
  for (std::string* text : {&operation.channel, &operation.kind, &operation.dtype, &operation.name})
    *text = base::printable(parser.text());
  return operation;
}

/// In the order in which they began.
std::vector<const base::OperationRecord*> recent_operations(const std::vector<base::OperationRecord>& operations) {
  std::vector<const base::OperationRecord*> recent;
  std::size_t going_on = 0, ended = 0;
  for (auto one = operations.rbegin(); one != operations.rend(); ++one)
    if ((one->is_running() ? going_on : ended)++ < kMaxPerKind) recent.push_back(&*one);
  std::reverse(recent.begin(), recent.end());
  return recent;
}

}  // namespace

std::string encode_snapshot(const base::RankSnapshot& seen) {
  std::string bytes;
  for (const std::int64_t number :
       {std::int64_t{seen.rank}, std::int64_t{seen.pid}, std::int64_t{seen.world_size}, seen.steps, seen.batches,
        std::int64_t{seen.waiting}, std::int64_t{seen.has_left}, seen.read_at_ns})
    put(bytes, number);
  for (const std::string* text : {&seen.job, &seen.transport, &seen.busy_with}) put_text(bytes, *text);
  const auto operations = recent_operations(seen.operations);
  put(bytes, static_cast<std::uint32_t>(operations.size()));
  for (const auto* operation : operations) put_operation(bytes, *operation);
  return bytes;
}

base::RankSnapshot decode_snapshot(std::string_view bytes) {
  PayloadReader parser(bytes);
  base::RankSnapshot seen;
  seen.rank = static_cast<int>(parser.number<std::int64_t>());
  seen.pid = static_cast<pid_t>(parser.number<std::int64_t>());
  seen.world_size = static_cast<int>(parser.number<std::int64_t>());
  seen.steps = parser.number<std::int64_t>();
  seen.batches = parser.number<std::int64_t>();
  seen.waiting = parser.number<std::int64_t>() != 0;
  seen.has_left = parser.number<std::int64_t>() != 0;
  seen.read_at_ns = parser.number<std::int64_t>();
  for (std::string* text : {&seen.job, &seen.transport, &seen.busy_with}) *text = base::printable(parser.text());
  seen.operations.resize(parser.count(64));
  for (base::OperationRecord& operation : seen.operations) operation = read_operation(parser);
  parser.end();
  return seen;
}

std::string encode_rank_exit(const RankExit& end) {
  return encode_numbers({end.rank, end.pid, end.code, end.signal, end.oom_kills});
}

RankExit decode_rank_exit(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 5);
  return {.rank = static_cast<int>(numbers[0]),
          .pid = numbers[1],
          .code = static_cast<int>(numbers[2]),
          .signal = static_cast<int>(numbers[3]),
          .oom_kills = numbers[4]};
}

std::string encode_host_info(const HostInfo& info) {
  std::string bytes;
  for (const std::string* text : {&info.host, &info.version, &info.build, &info.machine, &info.visible_gpus})
    put_text(bytes, *text);
  put(bytes, info.master_port);
  put(bytes, static_cast<std::int32_t>(info.gpus));
  put(bytes, static_cast<std::uint32_t>(info.cpus.size()));
  for (const Cpu& cpu : info.cpus)
    for (const int number : {cpu.id, cpu.core, cpu.node}) put(bytes, static_cast<std::int32_t>(number));
  return bytes;
}

HostInfo decode_host_info(std::string_view bytes) {
  PayloadReader parser(bytes);
  HostInfo info;
  for (std::string* text : {&info.host, &info.version, &info.build, &info.machine, &info.visible_gpus})
    *text = base::printable(parser.text());
  if (info.version != LOCKSTEP_VERSION || info.build != job::build_id(""))
    return info;  // what follows may have another form
  info.master_port = parser.number<std::uint16_t>();
  info.gpus = parser.number<std::int32_t>();
  info.cpus.resize(parser.count(12));
  for (Cpu& cpu : info.cpus)
    for (int* number : {&cpu.id, &cpu.core, &cpu.node}) *number = parser.number<std::int32_t>();
  parser.end();
  return info;
}

namespace {

void put_addresses(std::string& out, const std::vector<base::Address>& addresses) {
  put(out, static_cast<std::uint32_t>(addresses.size()));
  for (const base::Address& address : addresses) {
    put_text(out, address.host);
    put(out, address.port);
  }
}

base::Address read_address(PayloadReader& parser) {
  std::string host = base::printable(parser.text());
  return {std::move(host), parser.number<std::uint16_t>()};
}

std::vector<base::Address> read_addresses(PayloadReader& parser) {
  std::vector<base::Address> addresses(parser.count(6));
  for (base::Address& address : addresses) address = read_address(parser);
  return addresses;
}

}  // namespace

std::string encode_route_request(const RouteRequest& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.self));
  put_text(bytes, order.token);
  put_text(bytes, order.interface);
  put_addresses(bytes, order.launcher);
  return bytes;
}

RouteRequest decode_route_request(std::string_view bytes) {
  PayloadReader parser(bytes);
  RouteRequest order;
  order.self = parser.number<std::int32_t>();
  order.token = parser.text();
  order.interface = parser.text();
  order.launcher = read_addresses(parser);
  parser.end();
  return order;
}

std::string encode_route_reply(const RouteReply& reply) {
  std::string bytes;
  put_text(bytes, reply.error);
  put(bytes, static_cast<std::uint32_t>(reply.routes.size()));
  for (const Route& route : reply.routes) {
    put(bytes, static_cast<std::int32_t>(route.launcher));
    put(bytes, route.connection);
    put_text(bytes, route.address.host);
    put(bytes, route.address.port);
    put_text(bytes, route.interface);
  }
  return bytes;
}

RouteReply decode_route_reply(std::string_view bytes) {
  PayloadReader parser(bytes);
  RouteReply reply;
  reply.error = base::printable(parser.text());
  reply.routes.resize(parser.count(18));
  for (Route& route : reply.routes) {
    route.launcher = parser.number<std::int32_t>();
    route.connection = parser.number<std::uint32_t>();
    route.address = read_address(parser);
    route.interface = base::printable(parser.text());
  }
  parser.end();
  return reply;
}

std::string encode_probe_request(const ProbeRequest& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.launcher));
  put_addresses(bytes, order.peers);
  return bytes;
}

ProbeRequest decode_probe_request(std::string_view bytes) {
  PayloadReader parser(bytes);
  ProbeRequest order;
  order.launcher = parser.number<std::int32_t>();
  order.peers = read_addresses(parser);
  parser.end();
  return order;
}

std::string encode_probe_failures(const std::vector<ProbeFailure>& failures) {
  std::string bytes;
  put(bytes, static_cast<std::uint32_t>(failures.size()));
  for (const ProbeFailure& failure : failures) {
    put(bytes, static_cast<std::int32_t>(failure.node));
    put_text(bytes, failure.why);
  }
  return bytes;
}

std::vector<ProbeFailure> decode_probe_failures(std::string_view bytes) {
  PayloadReader parser(bytes);
  std::vector<ProbeFailure> failures(parser.count(8));
  for (ProbeFailure& failure : failures) {
    failure.node = parser.number<std::int32_t>();
    failure.why = base::printable(parser.text());
  }
  parser.end();
  return failures;
}

std::string encode_texts(const std::vector<std::string>& texts) {
  std::string bytes;
  put_texts(bytes, texts);
  return bytes;
}

std::vector<std::string> decode_texts(std::string_view bytes, std::size_t count) {
  PayloadReader parser(bytes);
  std::vector<std::string> texts = parser.texts();
  parser.end();
  if (texts.size() != count)
    throw_protocol_error(std::to_string(texts.size()) + " texts where " + std::to_string(count) + " are meant");
  for (std::string& text : texts) text = base::printable(text);
  return texts;
}

std::string encode_job(const JobPlan& job) {
  std::string bytes;
  put_text(bytes, job.program);
  put_texts(bytes, job.arguments);
  put_text(bytes, job.directory);
  put(bytes, static_cast<std::uint8_t>(job.extends_own_environment));
  put_texts(bytes, job.environment);
  put(bytes, static_cast<std::int64_t>(job.fail_grace.count()));
  put_text(bytes, job.run_dir);
  bytes += job.key.bytes();
  put(bytes, static_cast<std::uint32_t>(job.ranks.size()));
  for (const RankPlan& rank : job.ranks) {
    put(bytes, static_cast<std::int32_t>(rank.rank));
    put_texts(bytes, rank.environment);
    put_texts(bytes, rank.arguments);
    put(bytes, static_cast<std::uint32_t>(rank.cpus.size()));
    for (const int cpu : rank.cpus) put(bytes, static_cast<std::int32_t>(cpu));
  }
  return bytes;
}

JobPlan decode_job(std::string_view bytes) {
  PayloadReader parser(bytes);
  JobPlan job;
  job.program = parser.text();
  job.arguments = parser.texts();
  job.directory = parser.text();
  job.extends_own_environment = parser.number<std::uint8_t>() != 0;
  job.environment = parser.texts();
  job.fail_grace = std::chrono::milliseconds(parser.number<std::int64_t>());
  job.run_dir = parser.text();
  job.key = job::JobKey(parser.bytes(job::JobKey::kBytes));
  job.ranks.resize(parser.count(16));
  for (RankPlan& rank : job.ranks) {
    rank.rank = parser.number<std::int32_t>();
    rank.environment = parser.texts();
    rank.arguments = parser.texts();
    rank.cpus.resize(parser.count(4));
    for (int& cpu : rank.cpus) cpu = parser.number<std::int32_t>();
  }
  parser.end();
  return job;
}

}  // namespace lockstep::launcher
