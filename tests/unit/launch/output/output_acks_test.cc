#include <gtest/gtest.h>
#include <poll.h>

#include "lockstep/launch/output/background_writer.h"

namespace lockstep::launcher::output {
namespace {

bool is_readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

TEST(OutputAcks, ReturnsHalfAWindowAtATime) {
  OutputAcks acks(2, 1000);
  acks.receipt(1, Stream::kErr, 300);
  acks.receipt(1, Stream::kOut, 499);
  EXPECT_FALSE(is_readable(acks.fd()));
  EXPECT_TRUE(acks.take().empty());
  acks.receipt(1, Stream::kErr, 250);
  EXPECT_TRUE(is_readable(acks.fd()));
  const auto taken = acks.take();
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].rank, 1);
  EXPECT_EQ(taken[0].stream, Stream::kErr);
  EXPECT_EQ(taken[0].bytes, 550u);
  EXPECT_FALSE(is_readable(acks.fd()));
  EXPECT_TRUE(acks.take().empty());
}

TEST(OutputAcks, CountsWhenTheLastCopyIsDestroyedAndOutlivesTheObject) {
  auto acks = std::make_unique<OutputAcks>(1, 100);
  std::shared_ptr<void> first = acks->receipt(0, Stream::kOut, 80), second = first;
  first.reset();
  EXPECT_TRUE(acks->take().empty());
  second.reset();
  EXPECT_EQ(acks->take().size(), 1u);
  first = acks->receipt(0, Stream::kOut, 80);
  acks.reset();
  first.reset();
}

}  // namespace
}  // namespace lockstep::launcher::output
