#include "lockstep/launch/doctor/link_speed.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <future>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher::doctor {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

struct SocketPair {
  base::Fd a, b;
  SocketPair() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    a.reset(fds[0]);
    b.reset(fds[1]);
  }
};

TEST(LinkSpeed, MeasuresBothDirections) {
  SocketPair ends;
  auto served = std::async(std::launch::async, [&] { serve_link(ends.b.get(), Deadline::in(20s)); });
  const LinkSpeed speed = measure_link(ends.a.get(), Deadline::in(20s));
  ends.a.reset();
  served.get();
  EXPECT_GT(speed.round_trip_ns, 0);
  EXPECT_LT(speed.round_trip_ns, 1'000'000'000);
  EXPECT_GT(speed.bytes, 1u << 20);
  EXPECT_LE(speed.bytes, std::uint64_t{64} << 20);
  EXPECT_GT(speed.ns, 0);
  EXPECT_LT(speed.ns, 3'000'000'000);
}

TEST(LinkSpeed, ClosedPeerIsAnError) {
  SocketPair ends;
  ends.b.reset();
  EXPECT_THROW(measure_link(ends.a.get(), Deadline::in(5s)), base::Error);
  SocketPair again;
  again.a.reset();
  EXPECT_NO_THROW(serve_link(again.b.get(), Deadline::in(5s)));
}

TEST(LinkSpeed, SilentPeerTimesOut) {
  SocketPair ends;
  const auto begun = Deadline::Clock::now();
  EXPECT_THROW(measure_link(ends.a.get(), Deadline::in(200ms)), base::Error);
  EXPECT_THROW(serve_link(SocketPair().b.get(), Deadline::in(200ms)), base::Error);
  EXPECT_LT(Deadline::Clock::now() - begun, 5s);
}

}  // namespace
}  // namespace lockstep::launcher::doctor
