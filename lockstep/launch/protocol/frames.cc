#include "lockstep/launch/protocol/frames.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/join.h"
#include "lockstep/launch/protocol/status_messages.h"

namespace lockstep::launcher::protocol {
namespace {

constexpr std::size_t kHeaderBytes = 12;
constexpr std::string_view kStatusMagic = "LOCKSTS2";  // the last character is the version of the layout

}  // namespace

void throw_protocol_error(const std::string& what) {
  throw base::Error(base::Cause::kProtocol, std::string(kProtocolSubject) + ": " + what);
}

void throw_unexpected(FrameKind kind) {
  throw_protocol_error("an unexpected frame of the kind " + std::to_string(static_cast<int>(kind)));
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

void fields(Is<base::telemetry::OperationRecord> auto& operation, auto& field) {
  field(operation.number);
  field(operation.seq);
  field(operation.bytes);
  field(operation.step);
  field(operation.started);
  field(operation.ended);
  field(operation.channel);
  field(operation.kind);
  field(operation.dtype);
  field(operation.name);
}

/// All but the operations.
void fields(Is<base::telemetry::RankSnapshot> auto& snapshot, auto& field) {
  field(snapshot.rank);
  field(snapshot.pid);
  field(snapshot.world_size);
  field(snapshot.steps);
  field(snapshot.batches);
  field(snapshot.waiting);
  field(snapshot.has_left);
  field(snapshot.output_blocked);
  field(snapshot.read_at_ns);
  field(snapshot.gradient_reductions);
  field(snapshot.live_bytes);
  field(snapshot.peak_live_bytes);
  field(snapshot.high_water_bytes);
  field(snapshot.resident_bytes);
  field(snapshot.job);
  field(snapshot.transport);
  field(snapshot.busy_with);
  field(Raw{snapshot.handles});
}

std::string encode_snapshot(const base::telemetry::RankSnapshot& snapshot) {
  constexpr std::size_t kMaxPerKind = 32;  // running operations, and finished ones
  std::vector<base::telemetry::OperationRecord> recent;
  std::size_t running = 0, finished = 0;
  for (auto operation = snapshot.operations.rbegin(); operation != snapshot.operations.rend(); ++operation)
    if ((operation->is_running() ? running : finished)++ < kMaxPerKind) recent.push_back(*operation);
  std::reverse(recent.begin(), recent.end());
  return encoded(snapshot) + encoded(recent);
}

base::telemetry::RankSnapshot decode_snapshot(std::string_view bytes) {
  MessageReader reader(bytes);
  base::telemetry::RankSnapshot snapshot;
  reader(snapshot);
  reader(snapshot.operations);
  reader.end();
  snapshot.handles = base::escaped(snapshot.handles);
  return snapshot;
}

RankExit decode_rank_exit(std::string_view bytes) {
  RankExit end = decoded<RankExit>(bytes);
  if (end.message.size() > kMaxErrorMessageBytes)
    throw_protocol_error("an error message of " + std::to_string(end.message.size()) + " bytes; expected at most " +
                         std::to_string(kMaxErrorMessageBytes));
  return end;
}

void fields(Is<plan::Cpu> auto& cpu, auto& field) {
  field(cpu.id);
  field(cpu.core);
  field(cpu.node);
}

/// The facts that every version sends first, in this order.
void identity_fields(Is<plan::HostInfo> auto& info, auto& field) {
  field(info.host);
  field(info.version);
  field(info.build);
  field(info.machine);
  field(info.visible_gpus);
}

void fields(Is<plan::HostInfo> auto& info, auto& field) {
  field(info.master_port);
  field(info.gpus);
  field(info.cpus);
  field(info.cpu_quota);
}

std::string encode_host_info(const plan::HostInfo& info) {
  MessageWriter writer;
  identity_fields(info, writer);
  writer(info);
  return writer.take();
}

plan::HostInfo decode_host_info(std::string_view bytes) {
  MessageReader reader(bytes);
  plan::HostInfo info;
  identity_fields(info, reader);
  if (info.version != LOCKSTEP_VERSION || info.build != job::build_id(""))
    return info;  // the other values may have another format
  reader(info);
  reader.end();
  return info;
}

RouteRequest decode_route_request(std::string_view bytes) {
  RouteRequest request = decoded<RouteRequest>(bytes);
  if (request.host_timeout_ms < 1000) throw base::Error(base::Cause::kProtocol, "the host timeout is less than 1 s");
  return request;
}

std::string encode_texts(const std::vector<std::string>& texts) { return encoded(texts); }

std::vector<std::string> decode_texts(std::string_view bytes, std::size_t count) {
  auto texts = decoded<std::vector<std::string>>(bytes);
  if (texts.size() != count)
    throw_protocol_error(std::to_string(texts.size()) + " texts; expected " + std::to_string(count));
  return texts;
}

void fields(Is<plan::RankPlan> auto& rank, auto& field) {
  field(rank.rank);
  field(Raw{rank.environment});
  field(Raw{rank.arguments});
  field(rank.reads_stdin);
  field(rank.cpus);
}

/// All but the key.
void fields(Is<plan::JobPlan> auto& job, auto& field) {
  field(Raw{job.program});
  field(Raw{job.arguments});
  field(Raw{job.directory});
  field(job.extends_own_environment);
  field(Raw{job.environment});
  field(job.fail_grace);
  field(job.measures_activity);
  field(Raw{job.run_dir});
  field(job.output_window);
  field(job.label);
  field(job.ranks);
}

std::string encode_job(const plan::JobPlan& job) { return encoded(job) + std::string(job.key.bytes()); }

plan::JobPlan decode_job(std::string_view bytes) {
  MessageReader reader(bytes);
  plan::JobPlan job;
  reader(job);
  job.key = job::JobKey(reader.bytes(job::JobKey::kBytes));
  reader.end();
  return job;
}

/// All but the page.
void fields(Is<RankStatus> auto& rank, auto& field) {
  field(rank.rank);
  field(rank.host);
  field(rank.state, RankState::kUnknown);
  field(rank.pid);
  field(rank.cpu_percent);
  field(rank.resident_bytes);
}

std::string encode_rank_status(const RankStatus& rank) {
  return encoded(rank) + encoded(rank.page ? encode_snapshot(*rank.page) : "");
}

RankStatus decode_rank_status(std::string_view bytes) {
  MessageReader reader(bytes);
  RankStatus rank;
  std::string page;
  reader(rank);
  reader(Raw{page});
  reader.end();
  if (!page.empty()) rank.page = decode_snapshot(page);
  return rank;
}

std::string encode_job_status(const JobStatus& job) {
  std::vector<std::string> ranks;
  for (const RankStatus& rank : job.ranks) ranks.push_back(encode_rank_status(rank));
  return std::string(kStatusMagic) + encoded(job.label) + encoded(job.is_whole) + encoded(ranks);
}

JobStatus decode_job_status(std::string_view bytes) {
  MessageReader reader(bytes);
  if (reader.bytes(kStatusMagic.size()) != kStatusMagic)
    throw_protocol_error("a status of another version of Lockstep");
  JobStatus job;
  std::vector<std::string> ranks;
  reader(job.label);
  reader(job.is_whole);
  reader(Raw{ranks});
  reader.end();
  for (const std::string& rank : ranks) job.ranks.push_back(decode_rank_status(rank));
  return job;
}

}  // namespace lockstep::launcher::protocol
