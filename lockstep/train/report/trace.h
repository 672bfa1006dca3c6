// A trace of the steps of all ranks for Perfetto and chrome://tracing.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline report {

/// Returns JSON in the Trace Event Format: one process per rank with a track of steps, a track of phases, and as many
/// tracks as needed for operations with other ranks. Event arguments contain steps, bytes and operation numbers. Times
/// are microseconds since the first event, on one time axis (clock_offsets()). Pure.
std::string trace_json(const std::vector<RankRecord>& records);

/// Writes the trace to `path`, atomically. Throws SystemError.
void write_trace(const std::string& path, const std::vector<RankRecord>& records);

}  // namespace lockstep::training::inline report
