#include "lockstep/base/telemetry/span_log.h"

#include <gtest/gtest.h>

namespace lockstep::base::telemetry {
namespace {

TEST(SpanLog, ExistsOnceEnabled) {
  EXPECT_EQ(SpanLog::this_process(), nullptr);
  SpanLog::enable();
  SpanLog* const log = SpanLog::this_process();
  ASSERT_NE(log, nullptr);
  SpanLog::enable();
  EXPECT_EQ(SpanLog::this_process(), log);
}

TEST(SpanLog, KeepsTheNewestSpans) {
  SpanLog log;
  for (std::size_t i = 0; i < SpanLog::kMaxSpans + 5; ++i) log.add({"bucket", "fc", i, 0, 0});
  const auto spans = log.spans();
  ASSERT_EQ(spans.size(), SpanLog::kMaxSpans);
  EXPECT_EQ(spans.front().bytes, 5U);
  EXPECT_EQ(spans.back().bytes, SpanLog::kMaxSpans + 4);
}

}  // namespace
}  // namespace lockstep::base::telemetry
