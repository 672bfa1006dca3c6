#include "lockstep/launch/doctor/link_speed.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <future>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

struct Ends {
  base::Fd a, b;
  Ends() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    a.reset(fds[0]);
    b.reset(fds[1]);
  }
};

TEST(PairMeasure, BothEndsAgree) {
  Ends ends;
  auto served = std::async(std::launch::async, [&] { serve_pair(ends.b.get(), Deadline::in(20s)); });
  const PairSpeed speed = measure_pair(ends.a.get(), Deadline::in(20s));
  ends.a.reset();
  served.get();
  EXPECT_GT(speed.round_trip_ns, 0);
  EXPECT_LT(speed.round_trip_ns, 1'000'000'000);
  EXPECT_GT(speed.bytes, 1u << 20);
  EXPECT_LE(speed.bytes, std::uint64_t{64} << 20);
  EXPECT_GT(speed.ns, 0);
  EXPECT_LT(speed.ns, 3'000'000'000);
}

TEST(PairMeasure, AnEndThatIsGoneIsAnError) {
  Ends ends;
  ends.b.reset();
  EXPECT_THROW(measure_pair(ends.a.get(), Deadline::in(5s)), base::Error);
  Ends again;
  again.a.reset();
  EXPECT_NO_THROW(serve_pair(again.b.get(), Deadline::in(5s)));
}

TEST(PairMeasure, AnEndThatIsSilentIsWaitedForNoLongerThanAllowed) {
  Ends ends;
  const auto begun = Deadline::Clock::now();
  EXPECT_THROW(measure_pair(ends.a.get(), Deadline::in(200ms)), base::Error);
  EXPECT_THROW(serve_pair(Ends().b.get(), Deadline::in(200ms)), base::Error);
  EXPECT_LT(Deadline::Clock::now() - begun, 5s);
}

}  // namespace
}  // namespace lockstep::launcher
