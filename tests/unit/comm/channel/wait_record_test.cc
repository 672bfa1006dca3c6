// Tests WaitRecord.
#include "lockstep/comm/channel/wait_record.h"

#include <gtest/gtest.h>

namespace lockstep::comm::channel {
namespace {

TEST(WaitRecord, TextIsParsedBack) {
  const WaitRecord record{.beat = 7,
                          .channel = "world",
                          .seq = 12,
                          .text = "recv(float32[3]) from any rank",
                          .awaited = {0, 10, 2},
                          .any_member = true,
                          .hint = "make the call on all ranks",
                          .started = {{"world", 12}, {"world.0", 3}}};
  const auto parsed = WaitRecord::parse(record.to_text());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->beat, record.beat);
  EXPECT_EQ(parsed->channel, record.channel);
  EXPECT_EQ(parsed->seq, record.seq);
  EXPECT_EQ(parsed->text, record.text);
  EXPECT_EQ(parsed->awaited, record.awaited);
  EXPECT_TRUE(parsed->any_member);
  EXPECT_EQ(parsed->hint, record.hint);
  EXPECT_EQ(parsed->started, record.started);
}

TEST(WaitRecord, EmptyRecordIsNoWait) {
  const auto parsed = WaitRecord::parse(WaitRecord().to_text());
  ASSERT_TRUE(parsed);
  EXPECT_TRUE(parsed->channel.empty());
  EXPECT_FALSE(parsed->waits_for(0));
}

TEST(WaitRecord, OtherTextsAreNoRecords) {
  for (const char* text : {"", "7", "7\x1fworld\x1f", "\n\n"}) EXPECT_FALSE(WaitRecord::parse(text)) << text;
}

TEST(WaitRecord, OneOfSeveralRanksSuffices) {
  WaitRecord record{.awaited = {0, 1}};
  EXPECT_TRUE(record.waits_for(1));
  EXPECT_FALSE(record.waits_for(2));
  record.any_member = true;
  EXPECT_FALSE(record.waits_for(1));
}

}  // namespace
}  // namespace lockstep::comm::channel
