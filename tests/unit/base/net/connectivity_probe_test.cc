#include "lockstep/base/net/connectivity_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep::base::net {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

const std::string kToken(ConnectivityProbe::kTokenBytes, 't');

/// Polls all ends until `done` returns true, for at most 10 s.
void poll_until(const std::vector<ConnectivityProbe*>& ends, const auto& done) {
  const Deadline deadline = Deadline::in(10s);
  while (!done() && !deadline.expired())
    for (ConnectivityProbe* end : ends) {
      std::vector<pollfd> entries = end->entries();
      ::poll(entries.data(), entries.size(), 1);
      end->handle(entries);
    }
}

TEST(ConnectivityProbe, BothEndsAuthenticate) {
  ConnectivityProbe one(1, kToken), two(2, kToken);
  const Address first = one.listen("127.0.0.1");
  const Address second = one.listen("127.0.0.1");
  EXPECT_NE(first.port, second.port);
  two.connect_to(second, 1);
  poll_until({&one, &two}, [&] { return two.all_decided(); });
  ASSERT_EQ(two.outgoing().size(), 1u);
  EXPECT_EQ(two.outgoing()[0].error, "");
  EXPECT_EQ(two.outgoing()[0].from, "127.0.0.1");
  EXPECT_TRUE(two.outgoing()[0].fd);
  EXPECT_FALSE(one.take_incoming(2, 0, 0));
  EXPECT_FALSE(one.take_incoming(1, 1, 0));
  EXPECT_FALSE(one.take_incoming(2, 1, 1));
  EXPECT_TRUE(one.take_incoming(2, 1, 0));
}

/// A host with two addresses makes two connections.
TEST(ConnectivityProbe, ConnectionsOfOneNodeAreDistinguished) {
  ConnectivityProbe one(1, kToken), two(2, kToken);
  const Address address = one.listen("127.0.0.1");
  two.connect_to(address, 1);
  two.connect_to(address, 1);
  poll_until({&one, &two}, [&] { return two.all_decided(); });
  for (const std::size_t connection : {1u, 0u}) {
    const Fd incoming = one.take_incoming(2, 0, connection);
    ASSERT_TRUE(incoming);
    EXPECT_EQ(base::net::peer_address(incoming.get()).port,
              base::net::local_address(two.outgoing()[connection].fd.get()).port);
  }
}

TEST(ConnectivityProbe, EndpointMayReachItself) {
  ConnectivityProbe one(1, kToken);
  one.connect_to(one.listen("127.0.0.1"), 1);
  poll_until({&one}, [&] { return one.all_decided(); });
  EXPECT_EQ(one.outgoing()[0].error, "");
}

/// A host connects to itself if a peer has the same address, as docker0 has on each host.
TEST(ConnectivityProbe, ReachingItselfInsteadOfAPeerIsReported) {
  ConnectivityProbe one(1, kToken);
  one.connect_to(one.listen("127.0.0.1"), 2);
  poll_until({&one}, [&] { return one.all_decided(); });
  EXPECT_EQ(one.outgoing()[0].error, "the address belongs to this host itself");
}

TEST(ConnectivityProbe, WrongHostIsRejected) {
  ConnectivityProbe one(1, kToken), two(2, kToken);
  two.connect_to(one.listen("127.0.0.1"), 3);
  poll_until({&one, &two}, [&] { return two.all_decided(); });
  EXPECT_EQ(two.outgoing()[0].error, "another host of the job answers there");
  EXPECT_FALSE(two.outgoing()[0].fd);
}

TEST(ConnectivityProbe, WrongTokenGetsNoAnswer) {
  ConnectivityProbe one(1, kToken), unauthenticated(2, std::string(ConnectivityProbe::kTokenBytes, 'x'));
  unauthenticated.connect_to(one.listen("127.0.0.1"), 1);
  poll_until({&one, &unauthenticated}, [&] { return unauthenticated.all_decided(); });
  EXPECT_EQ(unauthenticated.outgoing()[0].error, "the listener there does not belong to this job");
  EXPECT_FALSE(one.take_incoming(2, 0, 0));
}

TEST(ConnectivityProbe, RefusedConnectionIsReported) {
  Address address;
  {
    const Fd listener = base::net::listen_on({"127.0.0.1", 0});
    address = base::net::local_address(listener.get());
  }
  ConnectivityProbe one(1, kToken);
  one.connect_to(address, 2);
  poll_until({&one}, [&] { return one.all_decided(); });
  EXPECT_EQ(one.outgoing()[0].error, "Connection refused");
}

TEST(ConnectivityProbe, UnansweredConnectionsFail) {
  const Fd listener = base::net::listen_on({"127.0.0.1", 0});
  ConnectivityProbe one(1, kToken);
  one.connect_to(base::net::local_address(listener.get()), 2);
  EXPECT_FALSE(one.all_decided());
  one.fail_undecided();
  EXPECT_TRUE(one.all_decided());
  EXPECT_EQ(one.outgoing()[0].error, "no answer");
}

TEST(ConnectivityProbe, InvalidAddressFailsAtOnce) {
  ConnectivityProbe one(1, kToken);
  one.connect_to({"not an address", 5}, 2);
  EXPECT_TRUE(one.all_decided());
  EXPECT_NE(one.outgoing()[0].error, "");
}

}  // namespace
}  // namespace lockstep::base::net
