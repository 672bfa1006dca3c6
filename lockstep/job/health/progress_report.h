// Where the ranks of a job are, from the last operations that each has recorded.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::job {

/// "rank 2", "ranks 0,3".
std::string format_ranks(const std::vector<int>& ranks);

/// "all_reduce(fc.weight)#12"
std::string operation_label(const base::OperationRecord& operation);
/// "all_reduce(fc.weight)#12 of world, 4096 bytes of float32".
std::string describe(const base::OperationRecord& operation);

/// For people, lines of it: which ranks are in which operation and for how long, which they finished last, and which
/// ranks have not come to an operation in which others of its group wait. Pure. All are in the world, and in what is
/// for all of it; another group is known by what its ranks have recorded: one that has never used it is not missed.
/// `ranks` are of one job, in the order of their numbers, seen at about one time on one host.
std::string progress_report(const std::vector<base::RankSnapshot>& ranks);

/// The operation that a rank is in: of those that go on, the one that began first, because what began later waits for
/// it or is its part; else the last one, if it was given up. Null when there is none.
const base::OperationRecord* current_operation(const base::RankSnapshot& rank);

/// The one that ended last. Null when none has.
const base::OperationRecord* last_finished_operation(const base::RankSnapshot& rank);

/// Of ranks of which none gets on, those to blame: who waits for nobody, else who has not come to an operation in which
/// others wait, else all that have not left. Pure.
std::vector<int> culprit_ranks(const std::vector<base::RankSnapshot>& ranks);

}  // namespace lockstep::job
