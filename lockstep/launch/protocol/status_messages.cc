#include "lockstep/launch/protocol/status_messages.h"

#include <utility>

#include "lockstep/base/byte_codec.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::protocol {
namespace {

constexpr std::string_view kMagic = "LOCKSTS1";  // the last character is the version of the layout
constexpr std::size_t kMinRankBytes = 4;         // the length of a text

}  // namespace

std::string encode_rank_status(const RankStatus& rank) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::int32_t>(rank.rank));
  base::put_text(bytes, rank.host);
  base::put_number(bytes, rank.state);
  base::put_number(bytes, rank.pid);
  base::put_number(bytes, static_cast<std::int32_t>(rank.cpu_percent.value_or(-1)));
  base::put_number(bytes, rank.resident_bytes);
  base::put_text(bytes, rank.page ? encode_snapshot(*rank.page) : "");
  return bytes;
}

RankStatus decode_rank_status(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  RankStatus rank;
  rank.rank = reader.number<std::int32_t>();
  rank.host = base::telemetry::printable(reader.text());
  const auto state = reader.number<std::uint8_t>();
  if (state > static_cast<std::uint8_t>(RankState::kUnknown))
    throw_protocol_error("the state " + std::to_string(state) + " of a rank");
  rank.state = static_cast<RankState>(state);
  rank.pid = reader.number<std::int64_t>();
  if (const auto percent = reader.number<std::int32_t>(); percent >= 0) rank.cpu_percent = percent;
  rank.resident_bytes = reader.number<std::uint64_t>();
  if (const std::string_view page = reader.text(); !page.empty()) rank.page = decode_snapshot(page);
  reader.end();
  return rank;
}

std::string encode_job_status(const JobStatus& job) {
  std::string bytes(kMagic);
  put_label(bytes, job.label);
  base::put_number(bytes, static_cast<std::uint8_t>(job.is_whole));
  base::put_number(bytes, static_cast<std::uint32_t>(job.ranks.size()));
  for (const RankStatus& rank : job.ranks) base::put_text(bytes, encode_rank_status(rank));
  return bytes;
}

JobStatus decode_job_status(std::string_view bytes) {
  base::ByteReader reader(bytes, kProtocolSubject);
  if (reader.bytes(kMagic.size()) != kMagic) throw_protocol_error("a status of another version of Lockstep");
  JobStatus job;
  job.label = read_label(reader);
  job.is_whole = reader.number<std::uint8_t>() != 0;
  job.ranks.resize(reader.count(kMinRankBytes));
  for (RankStatus& rank : job.ranks) rank = decode_rank_status(reader.text());
  reader.end();
  return job;
}

}  // namespace lockstep::launcher::protocol
