#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <map>

#include "lockstep/base/fd.h"
#include "lockstep/launch/agent/output_forwarder.h"

namespace lockstep::launcher::agent {
namespace {

/// A pipe that is not read until read_all() is called.
struct UnreadPipe {
  base::Pipe pipe = base::make_pipe();
  UnreadPipe() {
    base::set_nonblocking(pipe.write.get());
    base::set_nonblocking(pipe.read.get());
  }
  /// Flushes and reads in turn until nothing is left.
  std::vector<protocol::Frame> read_all(FrameQueue& queue) {
    protocol::FrameReader reader(protocol::kMaxFrameBytes);
    std::vector<protocol::Frame> frames;
    char bytes[1 << 16];
    for (ssize_t size = 1; size > 0 || !queue.empty();) {
      EXPECT_TRUE(queue.flush());
      size = ::read(pipe.read.get(), bytes, sizeof bytes);
      if (size > 0) reader.feed({bytes, static_cast<std::size_t>(size)});
      while (auto frame = reader.next()) frames.push_back(*frame);
    }
    return frames;
  }
};

TEST(FrameQueue, FramesArriveInOrder) {
  UnreadPipe channel;
  FrameQueue queue(channel.pipe.write.get());
  queue.push({protocol::FrameKind::kStdout, 0, "a"});
  queue.push({protocol::FrameKind::kRankExited, 0, "b"});
  const auto frames = channel.read_all(queue);
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].payload, "a");
  EXPECT_EQ(frames[1].payload, "b");
}

TEST(FrameQueue, NothingIsDroppedAndReportsOvertakeOutput) {
  UnreadPipe channel;
  constexpr int kChunks = 100;
  FrameQueue queue(channel.pipe.write.get());
  std::vector<int> ordered;
  for (int i = 0; i < kChunks; ++i) {
    queue.push({protocol::FrameKind::kStdout, i, std::string(10000, 'x')});
    ASSERT_TRUE(queue.flush());
  }
  queue.push({protocol::FrameKind::kRankExited, kChunks, ""});
  queue.push({protocol::FrameKind::kSnapshot, 7, "report"});
  queue.push({protocol::FrameKind::kCheckpointSaved, 8, "report"});
  queue.push({protocol::FrameKind::kDone, kChunks + 1, ""});
  const auto frames = channel.read_all(queue);
  ASSERT_EQ(frames.size(), kChunks + 4u);
  std::vector<std::size_t> reports;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (frames[i].payload == "report")
      reports.push_back(i);
    else
      ordered.push_back(frames[i].rank);
  }
  for (int i = 0; i < kChunks + 2; ++i) EXPECT_EQ(ordered[static_cast<std::size_t>(i)], i);
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_LE(reports[1], 9u) << "they follow the frames that the pipe of 64 KiB holds, and one that is half written";
}

TEST(FrameQueue, OnlyTheNewestRankHealthIsKept) {
  UnreadPipe channel;
  FrameQueue queue(channel.pipe.write.get());
  // More than the pipe can hold, so that one frame is half written.
  for (int beat = 0; beat < 20000; ++beat) {
    for (int rank = 0; rank < 2; ++rank) queue.push({protocol::FrameKind::kRankHealth, rank, std::to_string(beat)});
    ASSERT_TRUE(queue.flush());
  }
  queue.push({protocol::FrameKind::kRankExited, 0, ""});
  const auto frames = channel.read_all(queue);
  EXPECT_LT(frames.size(), 10000u);
  ASSERT_GE(frames.size(), 3u);
  EXPECT_EQ(frames.back().kind, protocol::FrameKind::kRankExited);
  std::map<int, std::string> last;
  for (const protocol::Frame& frame : frames)
    if (frame.kind == protocol::FrameKind::kRankHealth) last[frame.rank] = frame.payload;
  EXPECT_EQ(last, (std::map<int, std::string>{{0, "19999"}, {1, "19999"}}));
}

TEST(FrameQueue, ClosedReaderIsReported) {
  UnreadPipe channel;
  FrameQueue queue(channel.pipe.write.get());
  channel.pipe.read.reset();
  ::signal(SIGPIPE, SIG_IGN);
  queue.push({protocol::FrameKind::kDone, -1, ""});
  EXPECT_FALSE(queue.flush());
}

}  // namespace
}  // namespace lockstep::launcher::agent
