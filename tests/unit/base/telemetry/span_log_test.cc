#include "lockstep/base/telemetry/span_log.h"

#include <gtest/gtest.h>

namespace lockstep::base {
namespace {

TEST(SpanLog, IsThereOnceAskedFor) {
  EXPECT_EQ(SpanLog::process(), nullptr);
  SpanLog::switch_on();
  SpanLog* const log = SpanLog::process();
  ASSERT_NE(log, nullptr);
  SpanLog::switch_on();
  EXPECT_EQ(SpanLog::process(), log);
}

TEST(SpanLog, KeepsTheNewest) {
  SpanLog log;
  for (std::size_t i = 0; i < SpanLog::kMaxSpans + 5; ++i) log.add({"bucket", "fc", i, 0, 0});
  const auto spans = log.spans();
  ASSERT_EQ(spans.size(), SpanLog::kMaxSpans);
  EXPECT_EQ(spans.front().bytes, 5U);
  EXPECT_EQ(spans.back().bytes, SpanLog::kMaxSpans + 4);
}

}  // namespace
}  // namespace lockstep::base
