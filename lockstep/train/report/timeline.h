// One step of all ranks, as SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::train {

/// A step that all records have, the one of middle length on the first rank: neither the slowest nor the luckiest.
/// Nothing when there is none.
std::optional<std::int64_t> median_step(const std::vector<RankRecord>& records);

/// That step: a row a rank, with its phases, and below them its operations with other ranks. Times are moved by
/// `offsets` (common_time.h). At most `max_rows` ranks.
std::string timeline(const std::vector<RankRecord>& records, const std::vector<std::int64_t>& offsets,
                     std::int64_t step, std::size_t max_rows);

/// For spans [begin, end) a lane each, so that those of one lane do not overlap; as few lanes as it takes. Pure.
std::vector<int> assign_rows(const std::vector<std::pair<std::int64_t, std::int64_t>>& spans);

}  // namespace lockstep::train
