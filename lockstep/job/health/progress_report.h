// Reports what the ranks of a job are doing, from the last operations that each rank has recorded.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::job::health {

/// The channel of calls of one rank that are not operations of a group, which the hook for Python (watch.py) records.
inline constexpr const char* kPythonCalls = "Python calls";

/// Returns "rank 2" or "ranks 0,3".
std::string format_ranks(const std::vector<int>& ranks);

/// Returns "all_reduce(fc.weight)#12".
std::string operation_label(const base::telemetry::OperationRecord& operation);
/// Returns "all_reduce(fc.weight)#12 of world, 4096 bytes of float32".
std::string describe(const base::telemetry::OperationRecord& operation);

/// Returns a report in several lines. They list the operation that each rank is in, for how long it has been there, the
/// operation that it finished last, and the ranks that have not reached an operation in which other ranks wait. `ranks`
/// must belong to one job, be sorted by rank, and have been read at about the same time. Pure.
///
/// All ranks are members of the world's channels. The members of any other group are known only from the operations
/// that they recorded, so a rank that has never used such a group is not reported as missing.
std::string progress_report(const std::vector<base::telemetry::RankSnapshot>& ranks);

/// Returns the operation that a rank is in: the running operation that started first, because later ones wait for it or
/// are part of it. If none is running, returns the last operation if it was abandoned, else null.
const base::telemetry::OperationRecord* current_operation(const base::telemetry::RankSnapshot& rank);

/// Returns the operation of a group that finished last, or null if none has finished.
const base::telemetry::OperationRecord* last_finished_operation(const base::telemetry::RankSnapshot& rank);

/// Returns the culprits of a hang, in which no rank makes progress: of the ranks that do not wait for another rank,
/// those that have not reached the first operation in which others are, or all if there are none. If all ranks wait,
/// returns those that have not reached the first operation in which others wait; if there are none, all ranks that have
/// not left. Pure.
std::vector<int> culprit_ranks(const std::vector<base::telemetry::RankSnapshot>& ranks);

}  // namespace lockstep::job::health
