// The causes with which a run can end: one table row per cause, with its name and the launcher's exit code.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep::base {

/// Why a run ended. name() returns the spelling in a FATAL line; docs/reference/fatal-causes.md explains each cause.
enum class Cause {
  kRankExited,       ///< a rank returned a non-zero exit code; the launcher returns the same code
  kRankDied,         ///< a signal n killed a rank; the launcher returns 128 + n
  kInterrupted,      ///< the job was ended by Ctrl-C, SIGTERM or SIGHUP
  kBadArg,           ///< an invalid command line, option or environment variable
  kBadFile,          ///< a file with invalid content
  kPortInUse,        ///< another process uses the requested port
  kFolderInUse,      ///< another training writes to the directory
  kPeerUnreachable,  ///< a connection to another rank ended for an unknown reason
  kCoordinatorLost,  ///< the store (in the launcher, or in rank 0) does not answer
  kDesync,           ///< ranks made different calls
  kConfigMismatch,   ///< ranks differ in program, library, model or options
  kReplicaDiverged,  ///< a parameter that must be equal on all ranks is not
  kNonFinite,        ///< a gradient contains an infinity or a NaN
  kUnevenInput,      ///< a rank finished while other ranks still needed it
  kUnkillable,       ///< a process did not end after SIGKILL
  kNoProgress,       ///< several consecutive restarts of the job produced no newer checkpoint
  kInternal,         ///< a defect of Lockstep
  kResource,         ///< the operating system refused a process, a descriptor or memory
  kCkptWriteFailed,  ///< a checkpoint could not be written; the previous checkpoint is intact
  kProtocol,         ///< received bytes do not follow the protocol
  kWrongJob,         ///< the store belongs to another job
  kAuthFailed,       ///< the two ends of a connection have different job keys
  kStaleGen,         ///< the store belongs to another generation (start) of the same job
  kPreempted,        ///< all ranks stopped after the same step because a stop was requested
  kStraggler,        ///< only used in warnings: a rank is much slower than the others
  kJoinTimeout,      ///< not all ranks joined in time
  kRankStuck,        ///< ranks wait for each other and none makes progress
  kRankStalled,      ///< no thread of a rank runs, not even its heartbeat thread
};

inline constexpr std::size_t kNumCauses = static_cast<std::size_t>(Cause::kRankStalled) + 1;

/// Returns the name in a FATAL line: "DESYNC", "RANK_DIED", ...
std::string_view name(Cause cause);

/// Returns the cause with that name. Returns kInternal for an unknown name, which only another version of Lockstep or a
/// damaged line can contain: the reader then still reports the failure, as a defect instead of by its cause.
Cause cause_from_name(std::string_view name);

/// Returns the launcher's exit code for `cause`. kRankExited and kRankDied have no code of their own: this returns 1
/// for them, and the launcher returns the rank's exit code, or 128 + signal, instead.
int exit_code(Cause cause);

/// The same for a command that ends before it has started any rank: 64 for kBadArg and kPortInUse. A rank that finds an
/// invalid value itself ends with exit_code().
int exit_code_before_start(Cause cause);

}  // namespace lockstep::base
