// Gathers the run records of all ranks on rank 0.
#pragma once

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline metrics {

/// Collective: blocks until all ranks of `world` have called it. Returns the records in rank order on rank 0 and an
/// empty vector on other ranks. Throws what Group::all_gather_bytes() throws.
std::vector<RankRecord> gather_records(const comm::Group& world, const RankRecord& mine);

}  // namespace lockstep::training::inline metrics
