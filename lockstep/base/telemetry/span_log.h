// What lies inside the operations of this process, for a trace that somebody asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::base {

/// Times as in monotonic.h.
struct Span {
  std::string kind;  ///< "bucket", "wait"
  std::string name;
  std::uint64_t bytes = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// The newest spans. The process has none until somebody asks: who might write looks first, which costs nothing.
class SpanLog {
 public:
  static constexpr std::size_t kMaxSpans = std::size_t{1} << 15;

  /// Nothing as long as nobody has asked. Any thread.
  static SpanLog* this_process() noexcept;
  /// From now on there is one, until the process ends. Any thread.
  static void enable();

  void add(Span span);
  /// In the order in which they were added.
  std::vector<Span> spans() const;

 private:
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Span> spans_;
  std::size_t next_ = 0;  // the oldest, once there are kMaxSpans
};

}  // namespace lockstep::base
