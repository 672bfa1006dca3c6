#include "lockstep/launch/protocol/status_messages.h"

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::protocol {
namespace {

constexpr std::string_view kMagic = "LOCKSTS2";  // the last character is the version of the layout

}  // namespace

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
  return std::string(kMagic) + encoded(job.label) + encoded(job.is_whole) + encoded(ranks);
}

JobStatus decode_job_status(std::string_view bytes) {
  MessageReader reader(bytes);
  if (reader.bytes(kMagic.size()) != kMagic) throw_protocol_error("a status of another version of Lockstep");
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
