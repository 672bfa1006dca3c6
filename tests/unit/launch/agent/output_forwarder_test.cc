#include "lockstep/launch/agent/output_forwarder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include "lockstep/base/fd.h"

namespace lockstep::launcher::agent {
namespace {

constexpr std::size_t kWindow = 100'000;

/// Two ranks whose pipes the test writes, and the frames for the launcher.
struct TwoRanks {
  process::EventLoop loop;
  base::Pipe channel = base::make_pipe();
  FrameQueue queue{channel.write.get()};
  OutputForwarder forwarder{loop, queue};
  base::Pipe pipes[2][2];

  TwoRanks() {
    loop.at([] { return base::Deadline::in(std::chrono::seconds(0)); }, [] {});  // run_once() does not block
    base::set_nonblocking(channel.write.get());
    base::set_nonblocking(channel.read.get());
    forwarder.set_window(kWindow);
    for (int rank = 0; rank < 2; ++rank) {
      for (base::Pipe& pipe : pipes[rank]) {
        pipe = base::make_pipe();
        base::set_nonblocking(pipe.write.get());
      }
      forwarder.add_rank(10 + rank, {std::move(pipes[rank][0].read), std::move(pipes[rank][1].read)});
    }
  }

  /// Forwards until no pipe is to be read, and returns how many bytes of rank 10's stdout arrived.
  std::size_t forward_all() {
    std::size_t arrived = 0;
    protocol::FrameReader reader(protocol::kMaxFrameBytes);
    while (loop.run_once()) arrived += receive(reader);
    return arrived + receive(reader);
  }

  std::size_t receive(protocol::FrameReader& reader) {
    std::size_t arrived = 0;
    char bytes[1 << 16];
    for (ssize_t size = 1; size > 0 || !queue.empty();) {
      EXPECT_TRUE(queue.flush());
      size = ::read(channel.read.get(), bytes, sizeof bytes);
      if (size > 0) reader.feed({bytes, static_cast<std::size_t>(size)});
      while (auto frame = reader.next())
        if (frame->rank == 10 && frame->kind == protocol::FrameKind::kStdout) arrived += frame->payload.size();
    }
    return arrived;
  }

  /// Writes until the pipe is full, in pieces of `piece` bytes. Returns the number of bytes.
  std::size_t fill(int rank, int stream, std::size_t piece) {
    const std::string text(piece, 'x');
    std::size_t written = 0;
    for (ssize_t size; (size = ::write(pipes[rank][stream].write.get(), text.data(), text.size())) > 0;)
      written += static_cast<std::size_t>(size);
    return written;
  }

  /// Fills the pipe of a stream of rank 10 five times, and forwards each time. Returns the numbers of bytes written,
  /// and of those of its stdout that arrived.
  std::pair<std::size_t, std::size_t> fill_beyond_the_window(int stream, std::size_t piece) {
    std::size_t written = 0, arrived = 0;
    for (int i = 0; i < 5; ++i) {
      written += fill(0, stream, piece);
      arrived += forward_all();
    }
    return {written, arrived};
  }
};

TEST(OutputForwarder, AtMostAWindowIsOnItsWay) {
  TwoRanks ranks;
  auto [written, arrived] = ranks.fill_beyond_the_window(0, 1000);
  EXPECT_EQ(arrived, kWindow);
  EXPECT_GT(written, kWindow);
  EXPECT_TRUE(ranks.forwarder.is_blocked(0));
  EXPECT_FALSE(ranks.forwarder.is_blocked(1)) << "each stream of each rank has a window of its own";
  ASSERT_EQ(::write(ranks.pipes[1][0].write.get(), "x", 1), 1);
  ranks.forward_all();
  EXPECT_FALSE(ranks.forwarder.is_blocked(1));

  ranks.forwarder.acknowledge(10, 0, 30'000);
  EXPECT_EQ(ranks.forward_all(), 30'000u);
  ranks.forwarder.acknowledge(10, 0, kWindow);
  EXPECT_EQ(ranks.forward_all(), written - kWindow - 30'000);
  EXPECT_FALSE(ranks.forwarder.is_blocked(0));
}

TEST(OutputForwarder, AFullPipeOfOddWritesIsBlocked) {
  for (const std::size_t piece : {1u, 100u, 2049u, 3000u, 4096u}) {
    TwoRanks ranks;
    ranks.fill_beyond_the_window(1, piece);
    ranks.fill(0, 1, piece);
    EXPECT_TRUE(ranks.forwarder.is_blocked(0)) << piece;
  }
}

TEST(OutputForwarder, TheLastBytesOfARankNeedNoWindow) {
  TwoRanks ranks;
  auto [written, arrived] = ranks.fill_beyond_the_window(0, 1000);
  ranks.forwarder.forward_written(0);
  arrived += ranks.forward_all();
  EXPECT_EQ(arrived, written);
  ranks.forwarder.acknowledge(10, 0, 1);
  EXPECT_EQ(::write(ranks.pipes[0][0].write.get(), "x", 1), 1);
  EXPECT_EQ(ranks.forward_all(), 0u) << "it is more than a window beyond";
  ranks.forwarder.acknowledge(10, 0, written);
  EXPECT_EQ(ranks.forward_all(), 1u);
}

TEST(OutputForwarder, TheEndOfAPausedPipeDoesNotSpin) {
  TwoRanks ranks;
  auto [written, arrived] = ranks.fill_beyond_the_window(0, 1000);
  ranks.pipes[0][0].write.reset();
  EXPECT_FALSE(ranks.loop.run_once());
  ranks.forwarder.forward_rest();
  EXPECT_EQ(arrived + ranks.forward_all(), written);
}

}  // namespace
}  // namespace lockstep::launcher::agent
