// What all ranks recorded, on one of them.
#pragma once

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/report/rank_record.h"

namespace lockstep::train {

/// All ranks of `world` call it; returns when all have. On rank 0 the records in the order of ranks, elsewhere none.
/// Throws what Group::all_gather_bytes() throws.
std::vector<RankRecord> gather_records(comm::Group& world, const RankRecord& mine);

}  // namespace lockstep::train
