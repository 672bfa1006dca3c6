// One axis of time for ranks of several hosts.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::train {

/// For each record what is to be added to its times, so that all are of the first record's clock. 0 on the same host.
/// Between hosts the exchanges that both took part in end at nearly the same moment everywhere: the median of the
/// differences, off by what one host's end comes later in the middle (tenths of a millisecond in a local network).
/// Where there is none, the hosts' own clocks are believed. Pure.
std::vector<std::int64_t> clock_offsets(const std::vector<RankRecord>& records);

}  // namespace lockstep::train
