// The timeline of one step on all ranks, as SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline report {

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
