#include "lockstep/base/cause.h"

#include <array>
#include <cstddef>

namespace lockstep::base {
namespace {

struct Row {
  Cause cause;
  std::string_view name;
  int exit_code;
};

constexpr std::array kRows = {
    Row{Cause::kRankExited, "RANK_EXITED", 1},
    Row{Cause::kRankDied, "RANK_DIED", 1},
    Row{Cause::kInterrupted, "INTERRUPTED", 130},
    Row{Cause::kBadArg, "BAD_ARG", 78},
    Row{Cause::kBadFile, "BAD_FILE", 65},
    Row{Cause::kPortInUse, "PORT_IN_USE", 78},
    Row{Cause::kFolderInUse, "FOLDER_IN_USE", 73},
    Row{Cause::kPeerUnreachable, "PEER_UNREACHABLE", 69},
    Row{Cause::kCoordinatorLost, "COORDINATOR_LOST", 69},
    Row{Cause::kDesync, "DESYNC", 70},
    Row{Cause::kConfigMismatch, "CONFIG_MISMATCH", 70},
    Row{Cause::kReplicaDiverged, "REPLICA_DIVERGED", 70},
    Row{Cause::kNonFinite, "NON_FINITE", 70},
    Row{Cause::kUnevenInput, "UNEVEN_INPUT", 70},
    Row{Cause::kUnkillable, "UNKILLABLE", 70},
    Row{Cause::kNoProgress, "NO_PROGRESS", 70},
    Row{Cause::kInternal, "INTERNAL", 70},
    Row{Cause::kResource, "RESOURCE", 74},
    Row{Cause::kCkptWriteFailed, "CKPT_WRITE_FAILED", 74},
    Row{Cause::kProtocol, "PROTOCOL", 76},
    Row{Cause::kWrongJob, "WRONG_JOB", 76},
    Row{Cause::kAuthFailed, "AUTH_FAILED", 76},
    Row{Cause::kStaleGen, "STALE_GEN", 76},
    Row{Cause::kPreempted, "PREEMPTED", 75},
    Row{Cause::kStraggler, "STRAGGLER", 0},
    Row{Cause::kJoinTimeout, "JOIN_TIMEOUT", 124},
    Row{Cause::kRankStuck, "RANK_STUCK", 124},
    Row{Cause::kRankStalled, "RANK_STALLED", 124},
};

constexpr bool has_row_per_cause() {
  for (std::size_t i = 0; i < kRows.size(); ++i)
    if (kRows[i].cause != static_cast<Cause>(i)) return false;
  return kRows.size() == kNumCauses;
}
static_assert(has_row_per_cause(), "kRows has one row per cause, in the order of the enum");

const Row& row(Cause cause) { return kRows[static_cast<std::size_t>(cause)]; }

}  // namespace

std::string_view name(Cause cause) { return row(cause).name; }

Cause cause_from_name(std::string_view name) {
  for (const Row& r : kRows)
    if (r.name == name) return r.cause;
  return Cause::kInternal;
}

int exit_code(Cause cause) { return row(cause).exit_code; }

int exit_code_before_start(Cause cause) {
  return cause == Cause::kBadArg || cause == Cause::kPortInUse ? 64 : exit_code(cause);
}

}  // namespace lockstep::base
