#include "lockstep/launch/output/background_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher::output {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// Reads from `fd` until `writer` has drained.
std::string read_while_draining(int fd, BackgroundWriter& writer) {
  base::set_nonblocking(fd);
  std::string all;
  char bytes[1 << 16];
  const base::Deadline deadline = base::Deadline::in(20s);
  for (bool drained = false; !deadline.expired();) {
    const ssize_t size = ::read(fd, bytes, sizeof bytes);
    if (size > 0)
      all.append(bytes, static_cast<std::size_t>(size));
    else if (drained)
      break;
    else
      drained = writer.drain(1ms, 1ms);
  }
  return all;
}

TEST(BackgroundWriter, WritesInOrder) {
  base::Pipe pipe = base::make_pipe();
  BackgroundWriter writer(1 << 20);
  std::string want;
  for (int i = 0; i < 1000; ++i) {
    writer.write({pipe.write.get(), std::to_string(i) + "\n", 1});
    want += std::to_string(i) + "\n";
  }
  EXPECT_EQ(read_while_draining(pipe.read.get(), writer), want);
  EXPECT_EQ(writer.dropped(), 0);
}

TEST(BackgroundWriter, BlockedDescriptorDoesNotBlockTheCaller) {
  base::Pipe pipe = base::make_pipe();
  BackgroundWriter writer(100'000);
  const std::string line = std::string(999, 'x') + "\n";
  for (int i = 0; i < 1000; ++i) writer.write({pipe.write.get(), line, 1});
  writer.write({pipe.write.get(), "the end\n", 1, true});
  EXPECT_FALSE(writer.drain(50ms, 10s));
  EXPECT_GT(writer.dropped(), 500);
  const std::string all = read_while_draining(pipe.read.get(), writer);
  EXPECT_EQ(all.find("dropped"), std::string::npos) << "nothing is added to the output";
  EXPECT_TRUE(all.ends_with("the end\n"));
}

TEST(BackgroundWriter, KeptEntriesAreNotDropped) {
  base::Pipe pipe = base::make_pipe();
  BackgroundWriter writer(1000);
  for (int i = 0; i < 200; ++i) writer.write({pipe.write.get(), std::string(999, 'x') + "\n", 1, true});
  EXPECT_EQ(read_while_draining(pipe.read.get(), writer).size(), 200'000u);
  EXPECT_EQ(writer.dropped(), 0);
}

TEST(BackgroundWriter, ClosedReaderIsReportedOnce) {
  ::signal(SIGPIPE, SIG_IGN);
  base::Pipe gone = base::make_pipe();
  base::Pipe pipe = base::make_pipe();
  gone.read.reset();
  BackgroundWriter writer(1 << 20);
  writer.write({gone.write.get(), "x\n", 1});
  writer.write({gone.write.get(), "x\n", 1});
  writer.write({pipe.write.get(), "y\n", 1});
  EXPECT_TRUE(writer.drain(10s, 10s));
  EXPECT_EQ(writer.error(), EPIPE);
  EXPECT_EQ(read_while_draining(pipe.read.get(), writer), "y\n");
}

TEST(BackgroundWriter, ReceiptsLastUntilTheBytesAreWritten) {
  base::Pipe pipe = base::make_pipe();
  BackgroundWriter writer(BackgroundWriter::kNoLimit);
  std::vector<std::weak_ptr<void>> receipts;
  for (int i = 0; i < 20; ++i) {
    auto receipt = std::make_shared<int>(i);
    receipts.push_back(receipt);
    writer.write({pipe.write.get(), std::string(9999, 'x') + "\n", 1, false, std::move(receipt)});
  }
  EXPECT_FALSE(writer.drain(100ms, 10s));
  const auto alive = [&] {
    return std::count_if(receipts.begin(), receipts.end(), [](const auto& receipt) { return !receipt.expired(); });
  };
  EXPECT_GE(alive(), 14) << "a pipe holds 64 KiB: at most six entries and a part of the seventh";
  EXPECT_LT(alive(), 20);
  EXPECT_EQ(read_while_draining(pipe.read.get(), writer).size(), 200'000u);
  EXPECT_EQ(alive(), 0);
  EXPECT_EQ(writer.dropped(), 0);
}

TEST(BackgroundWriter, OnlyAStalledDescriptorLosesItsQueue) {
  base::Pipe pipe = base::make_pipe();
  BackgroundWriter writer(BackgroundWriter::kNoLimit);
  auto receipt = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = receipt;
  writer.write({pipe.write.get(), std::string(99'999, 'x') + "\n", 1, false, std::move(receipt)});
  for (int i = 0; i < 5; ++i) writer.write({pipe.write.get(), "queued\n", 1});
  EXPECT_FALSE(writer.drain(100ms, 10s));
  writer.drop_if_stalled(1h);
  EXPECT_EQ(writer.dropped(), 0);
  EXPECT_FALSE(watched.expired());
  writer.drop_if_stalled(50ms);
  EXPECT_EQ(writer.dropped(), 5);
  EXPECT_TRUE(watched.expired()) << "the entry in a write that blocks";
  writer.write({pipe.write.get(), "later\n", 1});
  const std::string all = read_while_draining(pipe.read.get(), writer);
  EXPECT_EQ(all.size(), 100'006u);
  EXPECT_TRUE(all.ends_with("x\nlater\n"));
}

}  // namespace
}  // namespace lockstep::launcher::output
