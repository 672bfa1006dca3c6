#include "lockstep/base/telemetry/span_log.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace lockstep::base {
namespace {

std::atomic<SpanLog*> of_process = nullptr;

}  // namespace

SpanLog* SpanLog::process() noexcept { return of_process.load(std::memory_order_acquire); }

void SpanLog::switch_on() {
  static SpanLog& log = *new SpanLog();  // never freed: threads may write as long as there are some
  of_process.store(&log, std::memory_order_release);
}

void SpanLog::add(LoggedSpan span) {
  const std::lock_guard lock(mutex_);
  if (spans_.size() < kMaxSpans) {
    spans_.push_back(std::move(span));
    return;
  }
  spans_[next_] = std::move(span);
  next_ = (next_ + 1) % kMaxSpans;
}

std::vector<LoggedSpan> SpanLog::spans() const {
  const std::lock_guard lock(mutex_);
  std::vector<LoggedSpan> all = spans_;
  std::rotate(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(next_), all.end());
  return all;
}

}  // namespace lockstep::base
