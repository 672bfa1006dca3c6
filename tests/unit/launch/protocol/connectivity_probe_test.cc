#include "lockstep/launch/protocol/connectivity_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

const std::string kToken(Crossing::kTokenBytes, 't');

/// Lets both ends work until `done`, 10 s at most.
void turn(const std::vector<Crossing*>& ends, const auto& done) {
  const Deadline deadline = Deadline::in(10s);
  while (!done() && !deadline.expired())
    for (Crossing* end : ends) {
      std::vector<pollfd> entries = end->entries();
      ::poll(entries.data(), entries.size(), 1);
      end->handle(entries);
    }
}

TEST(Crossing, BothEndsKnowEachOther) {
  Crossing one(1, kToken), two(2, kToken);
  const base::Address first = one.listen("127.0.0.1");
  const base::Address second = one.listen("127.0.0.1");
  EXPECT_NE(first.port, second.port);
  two.dial(second, 1);
  turn({&one, &two}, [&] { return two.all_decided(); });
  ASSERT_EQ(two.dialled().size(), 1u);
  EXPECT_EQ(two.dialled()[0].error, "");
  EXPECT_EQ(two.dialled()[0].from, "127.0.0.1");
  EXPECT_TRUE(two.dialled()[0].fd);
  EXPECT_FALSE(one.take_caller(2, 0, 0));
  EXPECT_FALSE(one.take_caller(1, 1, 0));
  EXPECT_FALSE(one.take_caller(2, 1, 1));
  EXPECT_TRUE(one.take_caller(2, 1, 0));
}

/// As from two addresses of one host: each end knows which connection is which.
TEST(Crossing, ConnectionsOfOneNodeAreToldApart) {
  Crossing one(1, kToken), two(2, kToken);
  const base::Address address = one.listen("127.0.0.1");
  two.dial(address, 1);
  two.dial(address, 1);
  turn({&one, &two}, [&] { return two.all_decided(); });
  for (const std::size_t dial : {1u, 0u}) {
    const base::Fd caller = one.take_caller(2, 0, dial);
    ASSERT_TRUE(caller);
    EXPECT_EQ(base::peer_address(caller.get()).port, base::local_address(two.dialled()[dial].fd.get()).port);
  }
}

TEST(Crossing, AnEndMayReachItself) {
  Crossing one(1, kToken);
  one.dial(one.listen("127.0.0.1"), 1);
  turn({&one}, [&] { return one.all_decided(); });
  EXPECT_EQ(one.dialled()[0].error, "");
}

/// docker0 has the same address on each host.
TEST(Crossing, WhoReachesItselfInsteadOfAnotherHears) {
  Crossing one(1, kToken);
  one.dial(one.listen("127.0.0.1"), 2);
  turn({&one}, [&] { return one.all_decided(); });
  EXPECT_EQ(one.dialled()[0].error, "that is this host itself");
}

TEST(Crossing, AnotherHostThanTheOneThatIsMeantIsNone) {
  Crossing one(1, kToken), two(2, kToken);
  two.dial(one.listen("127.0.0.1"), 3);
  turn({&one, &two}, [&] { return two.all_decided(); });
  EXPECT_EQ(two.dialled()[0].error, "another host answers there");
  EXPECT_FALSE(two.dialled()[0].fd);
}

TEST(Crossing, AStrangerGetsNoAnswer) {
  Crossing one(1, kToken), stranger(2, std::string(Crossing::kTokenBytes, 'x'));
  stranger.dial(one.listen("127.0.0.1"), 1);
  turn({&one, &stranger}, [&] { return stranger.all_decided(); });
  EXPECT_EQ(stranger.dialled()[0].error, "a stranger listens there");
  EXPECT_FALSE(one.take_caller(2, 0, 0));
}

TEST(Crossing, ARefusalIsSaid) {
  base::Address address;
  {
    const base::Fd listener = base::listen_on({"127.0.0.1", 0});
    address = base::local_address(listener.get());
  }
  Crossing one(1, kToken);
  one.dial(address, 2);
  turn({&one}, [&] { return one.all_decided(); });
  EXPECT_EQ(one.dialled()[0].error, "Connection refused");
}

TEST(Crossing, WhoeverDoesNotAnswerIsGivenUp) {
  const base::Fd listener = base::listen_on({"127.0.0.1", 0});
  Crossing one(1, kToken);
  one.dial(base::local_address(listener.get()), 2);
  EXPECT_FALSE(one.all_decided());
  one.give_up();
  EXPECT_TRUE(one.all_decided());
  EXPECT_EQ(one.dialled()[0].error, "no answer");
}

TEST(Crossing, AnAddressThatIsNoneIsDecidedAtOnce) {
  Crossing one(1, kToken);
  one.dial({"not an address", 5}, 2);
  EXPECT_TRUE(one.all_decided());
  EXPECT_NE(one.dialled()[0].error, "");
}

}  // namespace
}  // namespace lockstep::launcher
