// Offsets that put the clocks of several hosts on one time axis.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline report {

/// Returns for each record the offset, in nanoseconds, that converts its times to the clock of the first record; 0 for
/// ranks on the same host. Collectives end at nearly the same time on all hosts, so the offset between hosts is the
/// median of the differences between the ends of common operations. Its error is the median skew of those ends (tenths
/// of a millisecond in a local network). Without common operations, the hosts' wall clocks are used. Pure.
std::vector<std::int64_t> clock_offsets(const std::vector<RankRecord>& records);

}  // namespace lockstep::training::inline report
