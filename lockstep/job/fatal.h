// The one line that says why a run ended, and the place in the store where the first cause is kept.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/cause.h"
#include "lockstep/base/error.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// All that a FATAL line says. -1 and "" print as "-".
struct Fatal {
  base::Cause cause = base::Cause::kInternal;
  int rank = -1;
  std::string host;
  std::int64_t pid = -1;
  int gen = 0;
  std::int64_t step = -1;
  std::string op;      ///< "all_reduce(fc.weight)#12"
  std::string detail;  ///< UTF-8; printed quoted, at most 1 KiB
  std::string hint;
};

/// FATAL cause=<CODE> rank=<r> host=<h> pid=<p> gen=<g> step=<s> op=<name>#<seq> detail="<text>" hint="<text>"
std::string format_fatal(const Fatal& fatal);
/// The same after WARN: what does not end the run.
std::string format_warning(const Fatal& fatal);

/// Reads a line of format_fatal(); nothing when it is not one.
std::optional<Fatal> parse_fatal(std::string_view line);

/// The keys that launcher and ranks use together.
namespace key {
inline constexpr std::string_view kCause = "cause";  ///< the first cause, as format_fatal()
std::string exited(int rank);                        ///< set by the launcher when a rank's process ended: how
inline constexpr std::string_view kClosedWithoutCause =
    "ended without saying why";  ///< how, as far as rank 0 sees it where there is no launcher
std::string left(int rank);      ///< set by a rank that closes its world in good order
std::string progress(int rank);  ///< set by a rank that gets on, about once a second: a number that grows
}  // namespace key

/// A rank that lives and has lost its connections has new ones after this time: it beats every second.
inline constexpr std::chrono::seconds kReconnectGrace{2};

/// Keeps `fatal` as the job's first cause unless there is one already; the one that is kept. Never throws: a store that
/// is gone cannot be told, and then `fatal` is returned.
Fatal publish_cause(Store& store, const Fatal& fatal) noexcept;

}  // namespace lockstep::job
