// How the process of a rank ended, as the store records it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

enum class ExitKind {
  kClosed,  ///< all connections of the rank to the store have closed, and there is no launcher that knows its exit
  kCode,    ///< it exited
  kSignal,  ///< a signal ended it
};

/// The value of key::exited() in the store.
struct ExitRecord {
  ExitKind kind = ExitKind::kClosed;
  int number = 0;  ///< the exit code or the signal

  bool operator==(const ExitRecord&) const = default;
};

/// Returns "closed", "code 7" or "signal 9".
std::string encode(const ExitRecord& record);
/// Parses what encode() returns. Returns nullopt for anything else.
std::optional<ExitRecord> parse_exit_record(std::string_view text);

/// Returns the record of `rank`; nullopt if its process has not ended. Blocks as Store::find().
std::optional<ExitRecord> find_exit(Store& store, int rank, base::Deadline deadline);

/// Returns "ended without saying why", "exited with code 7" or "killed by SIGKILL".
std::string describe(const ExitRecord& record);

/// Returns "SIGKILL"; "signal 40" for a signal without a name.
std::string signal_name(int signal);

}  // namespace lockstep::job
