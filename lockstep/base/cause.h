// The causes a run can end with, as data: one row for each, with the exit code that the launcher returns for it.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::base {

/// Why a run ended. The names are those printed in a FATAL line; docs/04-errors.md explains each.
enum class Cause {
  kRankExited,       ///< a rank returned a code that is not 0; the launcher returns that code
  kRankDied,         ///< a rank died of signal n; the launcher returns 128 + n
  kInterrupted,      ///< Ctrl-C
  kBadArg,           ///< a command line, option or environment variable that is not allowed
  kBadFile,          ///< a file whose content is not allowed
  kPortInUse,        ///< the port that was asked for belongs to somebody else
  kPeerUnreachable,  ///< a connection to another rank ended without a reason that is known
  kCoordinatorLost,  ///< the store (launcher, or rank 0) does not answer
  kDesync,           ///< ranks made different calls
  kConfigMismatch,   ///< ranks differ in program, library, model or options
  kReplicaDiverged,  ///< a parameter that must be equal on all ranks is not
  kNonFinite,        ///< a gradient has an infinity or a NaN
  kUnevenInput,      ///< a rank finished while others still needed it
  kUnkillable,       ///< a process did not end after SIGKILL
  kNoProgress,       ///< restarts of the job one after another have brought no newer checkpoint
  kInternal,         ///< a defect of Lockstep
  kResource,         ///< the system refused a process, descriptor or memory
  kCkptWriteFailed,  ///< a checkpoint could not be written; the one before is whole
  kProtocol,         ///< bytes that are not of our protocol
  kWrongJob,         ///< the store belongs to another job
  kAuthFailed,       ///< one end does not have the other's job key
  kStaleGen,         ///< the store belongs to another start of the same job
  kPreempted,        ///< all ranks left at one step because somebody asked them to
  kStraggler,        ///< only of a warning: a rank takes much longer than the others
  kJoinTimeout,      ///< ranks did not arrive in time
  kRankStuck,        ///< ranks wait, and none gets on
  kRankStalled,      ///< no thread of a rank runs, not even the one that only shows that it is there
};

/// "DESYNC", "RANK_DIED", ...
std::string_view name(Cause cause);

/// The cause with that name; kInternal for a name that is not in the table.
Cause cause_from_name(std::string_view name);

/// The launcher's exit code for `cause`. kRankExited and kRankDied have none of their own: 1 is returned for them,
/// and the launcher puts the rank's code, or 128 + signal, in its place.
int exit_code(Cause cause);

}  // namespace lockstep::base
