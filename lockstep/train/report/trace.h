// Steps of all ranks as a trace for Perfetto and chrome://tracing.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::train {

/// JSON of the "Trace Event Format": a process a rank, in it a track of steps, one of phases, and as many as it takes
/// of operations with other ranks; arguments tell steps, bytes and numbers of operations. All on one axis of time,
/// microseconds since the first of it (common_time.h). Pure.
std::string trace_json(const std::vector<RankRecord>& records);

/// Puts it in the place of `path` in one step. Throws SystemError.
void write_trace(const std::string& path, const std::vector<RankRecord>& records);

}  // namespace lockstep::train
