#include "lockstep/train/metrics/gather_records.h"

#include <string>

namespace lockstep::training::inline metrics {

std::vector<RankRecord> gather_records(const comm::Group& world, const RankRecord& mine) {
  const std::vector<std::string> texts = world.all_gather_bytes(to_text(mine), {.name = "rank records"});
  std::vector<RankRecord> records;
  if (world.rank() == 0)
    for (const std::string& text : texts) records.push_back(rank_record_from_text(text));
  return records;
}

}  // namespace lockstep::training::inline metrics
