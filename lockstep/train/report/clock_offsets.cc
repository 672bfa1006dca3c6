#include "lockstep/train/report/clock_offsets.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace lockstep::training::inline report {
namespace {

std::int64_t estimate_offset(const RankRecord& one, const RankRecord& other) {
  std::map<std::pair<std::string, std::uint64_t>, std::int64_t> ends;
  for (const OperationSpan& span : one.operations)
    if (!span.channel.empty() && span.kind != "send" && span.kind != "recv")
      ends[{span.channel, span.seq}] = span.end_ns;
  std::vector<std::int64_t> differences;
  for (const OperationSpan& span : other.operations) {
    const auto found = ends.find({span.channel, span.seq});
    if (found != ends.end()) differences.push_back(found->second - span.end_ns);
  }
  if (differences.empty()) return (other.unix_ns - other.monotonic_ns) - (one.unix_ns - one.monotonic_ns);
  const auto middle = differences.begin() + static_cast<std::ptrdiff_t>(differences.size() / 2);
  std::nth_element(differences.begin(), middle, differences.end());
  return *middle;
}

}  // namespace

std::vector<std::int64_t> clock_offsets(const std::vector<RankRecord>& records) {
  std::map<std::string, std::int64_t> known;  // by clock, so that all ranks of a host have the same offset
  std::vector<std::int64_t> offsets;
  for (const RankRecord& record : records) {
    auto found = known.find(record.clock);
    if (found == known.end())
      found = known.emplace(record.clock, known.empty() ? 0 : estimate_offset(records.front(), record)).first;
    offsets.push_back(found->second);
  }
  return offsets;
}

}  // namespace lockstep::training::inline report
