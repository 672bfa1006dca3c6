// The FATAL line, which states why a run ended, and the store keys that the launcher and the ranks share, such as that
// of the first cause.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/cause.h"
#include "lockstep/base/error.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// The hint of a DESYNC of operations in general.
inline constexpr const char* kDesyncHint =
    "every rank must make the same calls in the same order: look for a call inside 'if (rank == 0)'";

/// The fields of a FATAL line. -1 and "" print as "-".
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

/// Returns the line
/// FATAL cause=<CODE> rank=<r> host=<h> pid=<p> gen=<g> step=<s> op=<name>#<seq> detail="<text>" hint="<text>"
std::string format_fatal(const Fatal& fatal);
/// Returns the same fields after "WARN" instead of "FATAL", for events that do not end the run.
std::string format_warning(const Fatal& fatal);

/// Parses a line that format_fatal() returned. Returns nullopt for any other line. An unknown cause becomes kInternal;
/// an invalid number becomes -1, or 0 for `gen`.
std::optional<Fatal> parse_fatal(std::string_view line);

/// Returns the fields for an error that ends this process: its cause, text and hint, this host and this process.
Fatal to_fatal(const base::Error& error);

/// Whether it is kDesync or kUnevenInput: ranks made calls that differ.
constexpr bool is_difference(base::Cause cause) {
  return cause == base::Cause::kDesync || cause == base::Cause::kUnevenInput;
}

/// Store keys that the launcher and the ranks share.
namespace key {
inline constexpr std::string_view kCause = "cause";                   ///< the first cause, as format_fatal()
inline constexpr std::string_view kReplacedCause = "cause/replaced";  ///< what replace_cause() has replaced
std::string exited(int rank);    ///< the ExitRecord of a rank whose process has ended; removed if it connects again
std::string left(int rank);      ///< set by a rank that leaves its world in good order
std::string progress(int rank);  ///< a number that grows, about once per second, while the rank makes progress
}  // namespace key

/// Publishes `fatal` as the job's first cause unless the store already has one. Returns the first cause in the store,
/// or `fatal` if the store is lost or does not reply. Blocks until the store replies, for at most 10 s (see Store).
Fatal publish_cause(Store& store, const Fatal& fatal) noexcept;

/// Publishes `fatal`, an exception during whose handling its rank made a call that others did not make, in the place of
/// the kDesync or kUnevenInput in the store that this has led to: one in which the rank takes part. If another rank
/// that takes part was handling an exception too, as in a program that trains in a catch block, that is not what has
/// led to it, and the difference is the cause again; kPeerUnreachable stands for such an exception. Leaves any other
/// cause, and publishes `fatal` if there is none, but not the loss of a peer. Blocks as publish_cause().
void replace_cause(Store& store, const Fatal& fatal) noexcept;

}  // namespace lockstep::job
