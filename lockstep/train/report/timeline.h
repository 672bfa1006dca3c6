// One time axis for the records of all ranks, and the timeline of one step as SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline report {

/// Returns for each record the offset, in nanoseconds, that converts its times to the clock of the first record; 0 for
/// ranks on the same host. Collectives end at nearly the same time on all hosts, so the offset between hosts is the
/// median of the differences between the ends of common operations. Its error is the median skew of those ends (tenths
/// of a millisecond in a local network). Without common operations, the hosts' wall clocks are used. Pure.
std::vector<std::int64_t> clock_offsets(const std::vector<RankRecord>& records);

/// Returns the step of median duration on the first rank among the steps that all records contain; nullopt if there is
/// none. Pure.
std::optional<std::int64_t> median_step(const std::vector<RankRecord>& records);

/// Draws a step: one row per rank, with its phases and, below them, its operations with other ranks. `offsets` are
/// those of clock_offsets(). Draws at most `max_rows` ranks. Pure.
std::string timeline(const std::vector<RankRecord>& records, const std::vector<std::int64_t>& offsets,
                     std::int64_t step, std::size_t max_rows);

/// Assigns each span [begin, end) to a row so that the spans of a row do not overlap, with as few rows as possible.
/// Pure.
std::vector<int> assign_rows(const std::vector<std::pair<std::int64_t, std::int64_t>>& spans);

}  // namespace lockstep::training::inline report
