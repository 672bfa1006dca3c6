// Gathers the run records of all ranks on rank 0.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline metrics {

/// Collective: blocks until all ranks of `world` have called it. Returns the records in rank order on rank 0 and an
/// empty vector on other ranks. Throws what Group::all_gather_bytes() throws.
inline std::vector<RankRecord> gather_records(const comm::Group& world, const RankRecord& mine) {
  std::vector<RankRecord> records;
  for (const std::string& text : world.all_gather_bytes(to_text(mine), {.name = "rank records"}))
    if (world.rank() == 0) records.push_back(rank_record_from_text(text));
  return records;
}

}  // namespace lockstep::training::inline metrics
