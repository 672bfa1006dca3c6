#include "lockstep/launch/protocol/frames.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/join.h"

namespace lockstep::launcher::protocol {
namespace {

constexpr std::size_t kHeaderBytes = 12;

}  // namespace

void throw_protocol_error(const std::string& what) {
  throw base::Error(base::Cause::kProtocol, std::string(kProtocolSubject) + ": " + what);
}

std::string encode(const Frame& frame) {
  std::string bytes;
  bytes.reserve(kHeaderBytes + frame.payload.size() + 1);
  base::put_number(bytes, static_cast<std::uint32_t>(frame.payload.size()));
  base::put_number(bytes, static_cast<std::uint32_t>(frame.kind));
  base::put_number(bytes, static_cast<std::int32_t>(frame.rank));
  bytes += frame.payload;
  return bytes += '\n';
}

std::optional<Frame> FrameReader::next() {
  const std::string_view rest = std::string_view(buffer_).substr(begin_);
  std::size_t length = 0;
  if (rest.size() >= kHeaderBytes) {
    base::ByteReader header(rest, kProtocolSubject);
    length = header.number<std::uint32_t>();
    const auto kind = header.number<std::uint32_t>();
    if (length > limit_)
      throw_protocol_error("a frame of " + std::to_string(length) + " bytes; expected at most " +
                           std::to_string(limit_));
    if (kind < static_cast<std::uint32_t>(FrameKind::kJob) || kind > static_cast<std::uint32_t>(FrameKind::kDone))
      throw_protocol_error("a frame of the unknown kind " + std::to_string(kind));
    if (rest.size() > kHeaderBytes + length) {
      if (rest[kHeaderBytes + length] != '\n') throw_protocol_error("a frame that does not end with a newline");
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
  for (const std::int64_t number : numbers) base::put_number(bytes, number);
  return bytes;
}

std::vector<std::int64_t> decode_numbers(std::string_view bytes, std::size_t count) {
  base::ByteReader reader(bytes, kProtocolSubject);
  std::vector<std::int64_t> numbers(count);
  for (std::int64_t& number : numbers) number = reader.number<std::int64_t>();
  reader.end();
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

std::string encode_rank_health(const job::health::RankHealth& health) {
  return encode_numbers({health.rank, health.since_heartbeat.count(), health.since_progress.count(),
                         health.since_report.count(), health.since_activity.count(), health.is_waiting,
                         static_cast<std::int64_t>(health.phase), health.process_state, health.steps, health.looks,
                         health.pending_looks});
}

job::health::RankHealth decode_rank_health(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 11);
  const auto phase = static_cast<job::health::RankPhase>(numbers[6]);
  if (numbers[6] < 0 || phase > job::health::RankPhase::kAfterWorld) throw_protocol_error("an unknown phase of a rank");
  return {.rank = static_cast<int>(numbers[0]),
          .since_heartbeat = std::chrono::milliseconds(numbers[1]),
          .since_progress = std::chrono::milliseconds(numbers[2]),
          .phase = phase,
          .process_state = static_cast<char>(numbers[7]),
          .since_report = std::chrono::milliseconds(numbers[3]),
          .since_activity = std::chrono::milliseconds(numbers[4]),
          .is_waiting = numbers[5] != 0,
          .steps = numbers[8],
          .looks = numbers[9],
          .pending_looks = numbers[10]};
}

namespace {

constexpr std::size_t kMaxPerKind = 32;  // running operations, and finished ones

void put_operation(std::string& out, const base::telemetry::OperationRecord& operation) {
  for (const std::uint64_t number : {operation.number, operation.seq, operation.bytes}) base::put_number(out, number);
  for (const std::int64_t number : {operation.step, operation.started, operation.ended}) base::put_number(out, number);
  for (const std::string* text : {&operation.channel, &operation.kind, &operation.dtype, &operation.name})
    base::put_text(out, *text);
}

base::telemetry::OperationRecord read_operation(base::ByteReader& reader) {
  base::telemetry::OperationRecord operation;
  for (std::uint64_t* number : {&operation.number, &operation.seq, &operation.bytes})
    *number = reader.number<std::uint64_t>();
  for (std::int64_t* number : {&operation.step, &operation.started, &operation.ended})
    *number = reader.number<std::int64_t>();
  for (std::string* text : {&operation.channel, &operation.kind, &operation.dtype, &operation.name})
    *text = base::telemetry::printable(reader.text());
  return operation;
}

/// Returns the most recent operations, both running and finished, in the order in which they began.
std::vector<const base::telemetry::OperationRecord*> recent_operations(
    const std::vector<base::telemetry::OperationRecord>& operations) {
  std::vector<const base::telemetry::OperationRecord*> recent;
  std::size_t running = 0, finished = 0;
  for (auto one = operations.rbegin(); one != operations.rend(); ++one)
    if ((one->is_running() ? running : finished)++ < kMaxPerKind) recent.push_back(&*one);
  std::reverse(recent.begin(), recent.end());
  return recent;
}

}  // namespace

std::string encode_snapshot(const base::telemetry::RankSnapshot& snapshot) {
  std::string bytes;
  for (const std::int64_t number :
       {std::int64_t{snapshot.rank}, std::int64_t{snapshot.pid}, std::int64_t{snapshot.world_size}, snapshot.steps,
        snapshot.batches, std::int64_t{snapshot.waiting}, std::int64_t{snapshot.has_left},
        std::int64_t{snapshot.output_blocked}, snapshot.read_at_ns})
    base::put_number(bytes, number);
  for (const std::uint64_t number : {snapshot.gradient_reductions, snapshot.live_bytes, snapshot.peak_live_bytes,
                                     snapshot.high_water_bytes, snapshot.resident_bytes})
    base::put_number(bytes, number);
  for (const std::string* text : {&snapshot.job, &snapshot.transport, &snapshot.busy_with, &snapshot.handles})
    base::put_text(bytes, *text);
  const auto operations = recent_operations(snapshot.operations);
  base::put_number(bytes, static_cast<std::uint32_t>(operations.size()));
  for (const auto* operation : operations) put_operation(bytes, *operation);
  return bytes;
}

base::telemetry::RankSnapshot decode_snapshot(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  base::telemetry::RankSnapshot snapshot;
  snapshot.rank = static_cast<int>(reader.number<std::int64_t>());
  snapshot.pid = static_cast<pid_t>(reader.number<std::int64_t>());
  snapshot.world_size = static_cast<int>(reader.number<std::int64_t>());
  snapshot.steps = reader.number<std::int64_t>();
  snapshot.batches = reader.number<std::int64_t>();
  snapshot.waiting = reader.number<std::int64_t>() != 0;
  snapshot.has_left = reader.number<std::int64_t>() != 0;
  snapshot.output_blocked = reader.number<std::int64_t>() != 0;
  snapshot.read_at_ns = reader.number<std::int64_t>();
  for (std::uint64_t* number : {&snapshot.gradient_reductions, &snapshot.live_bytes, &snapshot.peak_live_bytes,
                                &snapshot.high_water_bytes, &snapshot.resident_bytes})
    *number = reader.number<std::uint64_t>();
  for (std::string* text : {&snapshot.job, &snapshot.transport, &snapshot.busy_with})
    *text = base::telemetry::printable(reader.text());
  snapshot.handles = base::escaped(reader.text());
  snapshot.operations.resize(reader.count(64));
  for (base::telemetry::OperationRecord& operation : snapshot.operations) operation = read_operation(reader);
  reader.end();
  return snapshot;
}

std::string encode_rank_exit(const RankExit& end) {
  return encode_numbers({end.rank, end.pid, end.code, end.signal, end.oom_kills}) +
         encode_numbers({end.ports.begin(), end.ports.end()}) + end.message;
}

RankExit decode_rank_exit(std::string_view bytes) {
  RankExit end;
  const std::size_t count = 5 + end.ports.size(), size = count * sizeof(std::int64_t);
  const auto numbers = decode_numbers(bytes.substr(0, size), count);
  const std::string_view message = bytes.substr(size);
  if (message.size() > kMaxErrorMessageBytes)
    throw_protocol_error("an error message of " + std::to_string(message.size()) + " bytes; expected at most " +
                         std::to_string(kMaxErrorMessageBytes));
  end = {.rank = static_cast<int>(numbers[0]),
         .pid = numbers[1],
         .code = static_cast<int>(numbers[2]),
         .signal = static_cast<int>(numbers[3]),
         .oom_kills = numbers[4],
         .message = std::string(message)};
  std::copy(numbers.begin() + 5, numbers.end(), end.ports.begin());
  return end;
}

std::string encode_host_info(const plan::HostInfo& info) {
  std::string bytes;
  for (const std::string* text : {&info.host, &info.version, &info.build, &info.machine, &info.visible_gpus})
    base::put_text(bytes, *text);
  base::put_number(bytes, info.master_port);
  base::put_number(bytes, static_cast<std::int32_t>(info.gpus));
  base::put_number(bytes, static_cast<std::uint32_t>(info.cpus.size()));
  for (const plan::Cpu& cpu : info.cpus)
    for (const int number : {cpu.id, cpu.core, cpu.node}) base::put_number(bytes, static_cast<std::int32_t>(number));
  return bytes;
}

plan::HostInfo decode_host_info(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  plan::HostInfo info;
  for (std::string* text : {&info.host, &info.version, &info.build, &info.machine, &info.visible_gpus})
    *text = base::telemetry::printable(reader.text());
  if (info.version != LOCKSTEP_VERSION || info.build != job::build_id(""))
    return info;  // the other values may have another format
  info.master_port = reader.number<std::uint16_t>();
  info.gpus = reader.number<std::int32_t>();
  info.cpus.resize(reader.count(12));
  for (plan::Cpu& cpu : info.cpus)
    for (int* number : {&cpu.id, &cpu.core, &cpu.node}) *number = reader.number<std::int32_t>();
  reader.end();
  return info;
}

namespace {

void put_addresses(std::string& out, const std::vector<base::net::Address>& addresses) {
  base::put_number(out, static_cast<std::uint32_t>(addresses.size()));
  for (const base::net::Address& address : addresses) {
    base::put_text(out, address.host);
    base::put_number(out, address.port);
  }
}

base::net::Address read_address(base::ByteReader& reader) {
  std::string host = base::telemetry::printable(reader.text());
  return {std::move(host), reader.number<std::uint16_t>()};
}

std::vector<base::net::Address> read_addresses(base::ByteReader& reader) {
  std::vector<base::net::Address> addresses(reader.count(6));
  for (base::net::Address& address : addresses) address = read_address(reader);
  return addresses;
}

}  // namespace

std::string encode_route_request(const RouteRequest& request) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::int32_t>(request.self));
  base::put_text(bytes, request.token);
  base::put_text(bytes, request.interface);
  base::put_number(bytes, request.host_timeout_ms);
  put_addresses(bytes, request.launcher);
  return bytes;
}

RouteRequest decode_route_request(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  RouteRequest request;
  request.self = reader.number<std::int32_t>();
  request.token = reader.text();
  request.interface = reader.text();
  request.host_timeout_ms = reader.number<std::int32_t>();
  if (request.host_timeout_ms < 1000) throw base::Error(base::Cause::kProtocol, "the host timeout is less than 1 s");
  request.launcher = read_addresses(reader);
  reader.end();
  return request;
}

std::string encode_route_reply(const RouteReply& reply) {
  std::string bytes;
  base::put_text(bytes, reply.error);
  base::put_number(bytes, static_cast<std::uint32_t>(reply.routes.size()));
  for (const Route& route : reply.routes) {
    base::put_number(bytes, static_cast<std::int32_t>(route.launcher));
    base::put_number(bytes, route.connection);
    base::put_text(bytes, route.address.host);
    base::put_number(bytes, route.address.port);
    base::put_text(bytes, route.interface);
  }
  return bytes;
}

RouteReply decode_route_reply(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  RouteReply reply;
  reply.error = base::telemetry::printable(reader.text());
  reply.routes.resize(reader.count(18));
  for (Route& route : reply.routes) {
    route.launcher = reader.number<std::int32_t>();
    route.connection = reader.number<std::uint32_t>();
    route.address = read_address(reader);
    route.interface = base::telemetry::printable(reader.text());
  }
  reader.end();
  return reply;
}

std::string encode_probe_request(const ProbeRequest& request) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::int32_t>(request.launcher));
  put_addresses(bytes, request.peers);
  return bytes;
}

ProbeRequest decode_probe_request(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  ProbeRequest request;
  request.launcher = reader.number<std::int32_t>();
  request.peers = read_addresses(reader);
  reader.end();
  return request;
}

std::string encode_probe_failures(const std::vector<ProbeFailure>& failures) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::uint32_t>(failures.size()));
  for (const ProbeFailure& failure : failures) {
    base::put_number(bytes, static_cast<std::int32_t>(failure.node));
    base::put_text(bytes, failure.why);
  }
  return bytes;
}

std::vector<ProbeFailure> decode_probe_failures(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  std::vector<ProbeFailure> failures(reader.count(8));
  for (ProbeFailure& failure : failures) {
    failure.node = reader.number<std::int32_t>();
    failure.why = base::telemetry::printable(reader.text());
  }
  reader.end();
  return failures;
}

std::string encode_texts(const std::vector<std::string>& texts) {
  std::string bytes;
  base::put_texts(bytes, texts);
  return bytes;
}

std::vector<std::string> decode_texts(std::string_view bytes, std::size_t count) {
  base::ByteReader reader(bytes, kProtocolSubject);
  std::vector<std::string> texts = reader.texts();
  reader.end();
  if (texts.size() != count)
    throw_protocol_error(std::to_string(texts.size()) + " texts; expected " + std::to_string(count));
  for (std::string& text : texts) text = base::telemetry::printable(text);
  return texts;
}

void put_label(std::string& out, const plan::JobLabel& label) {
  for (const std::string* text : {&label.id, &label.name, &label.launcher_host}) base::put_text(out, *text);
  base::put_number(out, label.launcher_pid);
  base::put_number(out, static_cast<std::int32_t>(label.world_size));
}

plan::JobLabel read_label(base::ByteReader& reader) {
  plan::JobLabel label;
  for (std::string* text : {&label.id, &label.name, &label.launcher_host})
    *text = base::telemetry::printable(reader.text());
  label.launcher_pid = reader.number<std::int64_t>();
  label.world_size = reader.number<std::int32_t>();
  return label;
}

std::string encode_job(const plan::JobPlan& job) {
  std::string bytes;
  base::put_text(bytes, job.program);
  base::put_texts(bytes, job.arguments);
  base::put_text(bytes, job.directory);
  base::put_number(bytes, static_cast<std::uint8_t>(job.extends_own_environment));
  base::put_texts(bytes, job.environment);
  base::put_number(bytes, static_cast<std::int64_t>(job.fail_grace.count()));
  base::put_number(bytes, std::int64_t{job.measures_activity});
  base::put_text(bytes, job.run_dir);
  base::put_number(bytes, static_cast<std::uint32_t>(job.output_window));
  bytes += job.key.bytes();
  put_label(bytes, job.label);
  base::put_number(bytes, static_cast<std::uint32_t>(job.ranks.size()));
  for (const plan::RankPlan& rank : job.ranks) {
    base::put_number(bytes, static_cast<std::int32_t>(rank.rank));
    base::put_texts(bytes, rank.environment);
    base::put_texts(bytes, rank.arguments);
    base::put_number(bytes, static_cast<std::uint8_t>(rank.reads_stdin));
    base::put_number(bytes, static_cast<std::uint32_t>(rank.cpus.size()));
    for (const int cpu : rank.cpus) base::put_number(bytes, static_cast<std::int32_t>(cpu));
  }
  return bytes;
}

plan::JobPlan decode_job(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  plan::JobPlan job;
  job.program = reader.text();
  job.arguments = reader.texts();
  job.directory = reader.text();
  job.extends_own_environment = reader.number<std::uint8_t>() != 0;
  job.environment = reader.texts();
  job.fail_grace = std::chrono::milliseconds(reader.number<std::int64_t>());
  job.measures_activity = reader.number<std::int64_t>() != 0;
  job.run_dir = reader.text();
  job.output_window = reader.number<std::uint32_t>();
  job.key = job::JobKey(reader.bytes(job::JobKey::kBytes));
  job.label = read_label(reader);
  job.ranks.resize(reader.count(16));
  for (plan::RankPlan& rank : job.ranks) {
    rank.rank = reader.number<std::int32_t>();
    rank.environment = reader.texts();
    rank.arguments = reader.texts();
    rank.reads_stdin = reader.number<std::uint8_t>() != 0;
    rank.cpus.resize(reader.count(4));
    for (int& cpu : rank.cpus) cpu = reader.number<std::int32_t>();
  }
  reader.end();
  return job;
}

}  // namespace lockstep::launcher::protocol
