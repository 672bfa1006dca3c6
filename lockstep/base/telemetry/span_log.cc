#include "lockstep/base/telemetry/span_log.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace lockstep::base::telemetry {
namespace {

std::atomic<SpanLog*> process_log = nullptr;

}  // namespace

SpanLog* SpanLog::this_process() noexcept { return process_log.load(std::memory_order_acquire); }

void SpanLog::enable() {
  static SpanLog& log = *new SpanLog();  // never freed: threads may write until the process ends
  process_log.store(&log, std::memory_order_release);
}

void SpanLog::add(Span span) {
  const std::lock_guard lock(mutex_);
  if (spans_.size() < kMaxSpans) {
    spans_.push_back(std::move(span));
    return;
  }
  spans_[next_] = std::move(span);
  next_ = (next_ + 1) % kMaxSpans;
}

std::vector<Span> SpanLog::spans() const {
  const std::lock_guard lock(mutex_);
  std::vector<Span> copy = spans_;
  std::rotate(copy.begin(), copy.begin() + static_cast<std::ptrdiff_t>(next_), copy.end());
  return copy;
}

}  // namespace lockstep::base::telemetry
