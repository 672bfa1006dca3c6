// Reports what the ranks of a job are doing, from the last operations that each rank has recorded.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::job {

/// Returns "rank 2" or "ranks 0,3".
std::string format_ranks(const std::vector<int>& ranks);

/// Returns "all_reduce(fc.weight)#12".
std::string operation_label(const base::OperationRecord& operation);
/// Returns "all_reduce(fc.weight)#12 of world, 4096 bytes of float32".
std::string describe(const base::OperationRecord& operation);

/// Returns a report in several lines: which ranks are in which operation and for how long, which operation they
/// finished last, and which ranks have not reached an operation in which other ranks of its group wait. `ranks` must
/// belong to one job, be sorted by rank, and have been read at about the same time on one host. Every rank is a member
/// of the channels of the world; the members of any other group are known only from their recorded operations, so a
/// rank that has never used such a group is not reported as missing. Pure.
std::string progress_report(const std::vector<base::RankSnapshot>& ranks);

/// Returns the operation that a rank is in: the running operation that started first, because later ones wait for it or
/// are part of it; otherwise the last operation if it was abandoned. Returns null if there is none.
const base::OperationRecord* current_operation(const base::RankSnapshot& rank);

/// Returns the operation that finished last, or null if none has finished.
const base::OperationRecord* last_finished_operation(const base::RankSnapshot& rank);

/// Returns the culprits among ranks of which none makes progress: the ranks that do not wait for another rank; if there
/// are none, the ranks that have not reached an operation in which others wait; otherwise all ranks that have not left.
/// Pure.
std::vector<int> culprit_ranks(const std::vector<base::RankSnapshot>& ranks);

}  // namespace lockstep::job
