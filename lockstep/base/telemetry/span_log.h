// A log of the time spans inside this process's operations. Spans are recorded only after tracing has been enabled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::base::telemetry {

/// A named interval. Times are those of monotonic_ns().
struct Span {
  std::string kind;  ///< "bucket", "wait"
  std::string name;
  std::uint64_t bytes = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// A ring of the newest kMaxSpans spans. All methods are thread-safe. A process has no log until enable() is called;
/// code that records spans checks this_process() first, which costs one atomic load.
class SpanLog {
 public:
  static constexpr std::size_t kMaxSpans = std::size_t{1} << 15;

  /// Returns the log of this process, or nullptr if tracing is not enabled.
  static SpanLog* this_process() noexcept;
  /// Creates the log of this process, which then exists until the process ends. Further calls have no effect.
  static void enable();

  void add(Span span);
  /// Returns a copy of the spans in the order in which they were added.
  std::vector<Span> spans() const;

 private:
  mutable std::mutex mutex_;  // guards the members below
  std::vector<Span> spans_;
  std::size_t next_ = 0;  // index of the oldest span, once there are kMaxSpans
};

}  // namespace lockstep::base::telemetry
