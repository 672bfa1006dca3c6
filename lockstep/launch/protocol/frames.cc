#include "lockstep/launch/protocol/frames.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/job/join.h"
#include "lockstep/launch/protocol/codec.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kHeader = 12;

}  // namespace

std::string encode(const Frame& frame) {
  std::string bytes;
  bytes.reserve(kHeader + frame.payload.size() + 1);
  put(bytes, static_cast<std::uint32_t>(frame.payload.size()));
  put(bytes, static_cast<std::uint32_t>(frame.kind));
  put(bytes, static_cast<std::int32_t>(frame.rank));
  bytes += frame.payload;
  return bytes += '\n';
}

std::optional<Frame> FrameReader::next() {
  const std::string_view rest = std::string_view(buffer_).substr(begin_);
  std::size_t length = 0;
  if (rest.size() >= kHeader) {
    Parser header(rest);
    length = header.number<std::uint32_t>();
    const auto kind = header.number<std::uint32_t>();
    if (length > limit_)
      refuse("a frame of " + std::to_string(length) + " bytes; allowed are " + std::to_string(limit_));
    if (kind < static_cast<std::uint32_t>(FrameKind::kJob) || kind > static_cast<std::uint32_t>(FrameKind::kDone))
      refuse("a frame of kind " + std::to_string(kind));
    if (rest.size() > kHeader + length) {
      if (rest[kHeader + length] != '\n') refuse("a frame without its last byte");
      begin_ += kHeader + length + 1;
      return Frame{static_cast<FrameKind>(kind), header.number<std::int32_t>(),
                   std::string(rest.substr(kHeader, length))};
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
  Parser parser(bytes);
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

std::string encode_stop(const Stop& stop) {
  return encode_numbers({stop.signal, stop.warning.count(), stop.grace.count()});
}

Stop decode_stop(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 3);
  return {static_cast<int>(numbers[0]), std::chrono::milliseconds(numbers[1]), std::chrono::milliseconds(numbers[2])};
}

std::string encode_pulse(const job::Pulse& pulse) {
  return encode_numbers({pulse.rank, pulse.silent.count(), pulse.idle.count(), pulse.in_world, pulse.state});
}

job::Pulse decode_pulse(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 5);
  return {.rank = static_cast<int>(numbers[0]),
          .silent = std::chrono::milliseconds(numbers[1]),
          .idle = std::chrono::milliseconds(numbers[2]),
          .in_world = numbers[3] != 0,
          .state = static_cast<char>(numbers[4])};
}

namespace {

constexpr std::size_t kOfEach = 32;  // operations that go on, and that have ended

void put_operation(std::string& out, const base::FlightSeen& operation) {
  for (const std::uint64_t number : {operation.number, operation.seq, operation.bytes}) put(out, number);
  for (const std::int64_t number : {operation.step, operation.begun, operation.ended}) put(out, number);
  for (const std::string* text : {&operation.channel, &operation.kind, &operation.dtype, &operation.name})
    put_text(out, *text);
}

base::FlightSeen take_operation(Parser& parser) {
  base::FlightSeen operation;
  for (std::uint64_t* number : {&operation.number, &operation.seq, &operation.bytes})
    *number = parser.number<std::uint64_t>();
  for (std::int64_t* number : {&operation.step, &operation.begun, &operation.ended})
    *number = parser.number<std::int64_t>();
  for (std::string* text : {&operation.channel, &operation.kind, &operation.dtype, &operation.name})
    *text = base::printable(parser.text());
  return operation;
}

/// In the order in which they began.
std::vector<const base::FlightSeen*> worth_telling(const std::vector<base::FlightSeen>& operations) {
  std::vector<const base::FlightSeen*> told;
  std::size_t going_on = 0, ended = 0;
  for (auto one = operations.rbegin(); one != operations.rend(); ++one)
    if ((one->goes_on() ? going_on : ended)++ < kOfEach) told.push_back(&*one);
  std::reverse(told.begin(), told.end());
  return told;
}

}  // namespace

std::string encode_seen(const base::RankSeen& seen) {
  std::string bytes;
  for (const std::int64_t number :
       {std::int64_t{seen.rank}, std::int64_t{seen.pid}, std::int64_t{seen.world_size}, seen.steps, seen.batches,
        std::int64_t{seen.waiting}, std::int64_t{seen.left}, seen.looked_ns})
    put(bytes, number);
  for (const std::string* text : {&seen.job, &seen.transport, &seen.busy_with}) put_text(bytes, *text);
  const auto operations = worth_telling(seen.operations);
  put(bytes, static_cast<std::uint32_t>(operations.size()));
  for (const auto* operation : operations) put_operation(bytes, *operation);
  return bytes;
}

base::RankSeen decode_seen(std::string_view bytes) {
  Parser parser(bytes);
  base::RankSeen seen;
  seen.rank = static_cast<int>(parser.number<std::int64_t>());
  seen.pid = static_cast<pid_t>(parser.number<std::int64_t>());
  seen.world_size = static_cast<int>(parser.number<std::int64_t>());
  seen.steps = parser.number<std::int64_t>();
  seen.batches = parser.number<std::int64_t>();
  seen.waiting = parser.number<std::int64_t>() != 0;
  seen.left = parser.number<std::int64_t>() != 0;
  seen.looked_ns = parser.number<std::int64_t>();
  for (std::string* text : {&seen.job, &seen.transport, &seen.busy_with}) *text = base::printable(parser.text());
  seen.operations.resize(parser.count(64));
  for (base::FlightSeen& operation : seen.operations) operation = take_operation(parser);
  parser.end();
  return seen;
}

std::string encode_end(const RankEnd& end) {
  return encode_numbers({end.rank, end.pid, end.code, end.signal, end.oom_kills});
}

RankEnd decode_end(std::string_view bytes) {
  const auto numbers = decode_numbers(bytes, 5);
  return {.rank = static_cast<int>(numbers[0]),
          .pid = numbers[1],
          .code = static_cast<int>(numbers[2]),
          .signal = static_cast<int>(numbers[3]),
          .oom_kills = numbers[4]};
}

std::string encode_site(const Site& site) {
  std::string bytes;
  for (const std::string* text : {&site.host, &site.version, &site.build, &site.machine, &site.visible_gpus})
    put_text(bytes, *text);
  put(bytes, site.master_port);
  put(bytes, static_cast<std::int32_t>(site.gpus));
  put(bytes, static_cast<std::uint32_t>(site.cpus.size()));
  for (const Cpu& cpu : site.cpus)
    for (const int number : {cpu.id, cpu.core, cpu.node}) put(bytes, static_cast<std::int32_t>(number));
  return bytes;
}

Site decode_site(std::string_view bytes) {
  Parser parser(bytes);
  Site site;
  for (std::string* text : {&site.host, &site.version, &site.build, &site.machine, &site.visible_gpus})
    *text = base::printable(parser.text());
  if (site.version != LOCKSTEP_VERSION || site.build != job::build_id(""))
    return site;  // what follows may have another form
  site.master_port = parser.number<std::uint16_t>();
  site.gpus = parser.number<std::int32_t>();
  site.cpus.resize(parser.count(12));
  for (Cpu& cpu : site.cpus)
    for (int* number : {&cpu.id, &cpu.core, &cpu.node}) *number = parser.number<std::int32_t>();
  parser.end();
  return site;
}

namespace {

void put_addresses(std::string& out, const std::vector<base::Address>& addresses) {
  put(out, static_cast<std::uint32_t>(addresses.size()));
  for (const base::Address& address : addresses) {
    put_text(out, address.host);
    put(out, address.port);
  }
}

base::Address take_address(Parser& parser) {
  std::string host = base::printable(parser.text());
  return {std::move(host), parser.number<std::uint16_t>()};
}

std::vector<base::Address> take_addresses(Parser& parser) {
  std::vector<base::Address> addresses(parser.count(6));
  for (base::Address& address : addresses) address = take_address(parser);
  return addresses;
}

}  // namespace

std::string encode_meet(const MeetOrder& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.self));
  put_text(bytes, order.token);
  put_text(bytes, order.interface);
  put_addresses(bytes, order.launcher);
  return bytes;
}

MeetOrder decode_meet(std::string_view bytes) {
  Parser parser(bytes);
  MeetOrder order;
  order.self = parser.number<std::int32_t>();
  order.token = parser.text();
  order.interface = parser.text();
  order.launcher = take_addresses(parser);
  parser.end();
  return order;
}

std::string encode_met(const MeetReply& reply) {
  std::string bytes;
  put_text(bytes, reply.error);
  put(bytes, static_cast<std::uint32_t>(reply.doors.size()));
  for (const Door& door : reply.doors) {
    put(bytes, static_cast<std::int32_t>(door.launcher));
    put(bytes, door.dial);
    put_text(bytes, door.address.host);
    put(bytes, door.address.port);
    put_text(bytes, door.interface);
  }
  return bytes;
}

MeetReply decode_met(std::string_view bytes) {
  Parser parser(bytes);
  MeetReply reply;
  reply.error = base::printable(parser.text());
  reply.doors.resize(parser.count(18));
  for (Door& door : reply.doors) {
    door.launcher = parser.number<std::int32_t>();
    door.dial = parser.number<std::uint32_t>();
    door.address = take_address(parser);
    door.interface = base::printable(parser.text());
  }
  parser.end();
  return reply;
}

std::string encode_probe(const ProbeOrder& order) {
  std::string bytes;
  put(bytes, static_cast<std::int32_t>(order.launcher));
  put_addresses(bytes, order.peers);
  return bytes;
}

ProbeOrder decode_probe(std::string_view bytes) {
  Parser parser(bytes);
  ProbeOrder order;
  order.launcher = parser.number<std::int32_t>();
  order.peers = take_addresses(parser);
  parser.end();
  return order;
}

std::string encode_probed(const std::vector<ProbeFailure>& failures) {
  std::string bytes;
  put(bytes, static_cast<std::uint32_t>(failures.size()));
  for (const ProbeFailure& failure : failures) {
    put(bytes, static_cast<std::int32_t>(failure.node));
    put_text(bytes, failure.why);
  }
  return bytes;
}

std::vector<ProbeFailure> decode_probed(std::string_view bytes) {
  Parser parser(bytes);
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
  Parser parser(bytes);
  std::vector<std::string> texts = parser.texts();
  parser.end();
  if (texts.size() != count)
    refuse(std::to_string(texts.size()) + " texts where " + std::to_string(count) + " are meant");
  for (std::string& text : texts) text = base::printable(text);
  return texts;
}

std::string encode_job(const JobPlan& job) {
  std::string bytes;
  put_text(bytes, job.program);
  put_texts(bytes, job.arguments);
  put_text(bytes, job.directory);
  put(bytes, static_cast<std::uint8_t>(job.add_to_own));
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
  Parser parser(bytes);
  JobPlan job;
  job.program = parser.text();
  job.arguments = parser.texts();
  job.directory = parser.text();
  job.add_to_own = parser.number<std::uint8_t>() != 0;
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
