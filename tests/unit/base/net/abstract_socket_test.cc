#include "lockstep/base/net/abstract_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace lockstep::base::net {
namespace {

constexpr const char* kPrefix = "lockstep-unit-test-";

TEST(AbstractSocket, AllListenersWithThePrefixAreFound) {
  std::optional<AbstractListener> one(kPrefix), two(kPrefix);
  const AbstractListener other("lockstep-other-unit-test-");
  const std::vector<AbstractConnection> connections = connect_to_all(kPrefix);
  ASSERT_EQ(connections.size(), 2u);
  EXPECT_EQ(connections[0].pid, ::getpid());
  const Fd accepted = one->try_accept();
  ASSERT_TRUE(accepted);
  EXPECT_TRUE(two->try_accept());
  EXPECT_FALSE(one->try_accept());
  EXPECT_FALSE(other.try_accept());
  EXPECT_EQ(connect_to_all(kPrefix).size(), 2u) << "the name of an accepted connection is not another listener";
  one.reset();
  EXPECT_EQ(connect_to_all(kPrefix).size(), 1u);
  two.reset();
  EXPECT_TRUE(connect_to_all(kPrefix).empty());
}

TEST(AbstractSocket, OtherUsersAreRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "changing the user requires root";
  const AbstractListener listener(kPrefix);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(2);
    ::_exit(connect_to_all(kPrefix).empty() ? 0 : 1);  // the listener belongs to another user
  }
  int status = 0;
  ::waitpid(child, &status, 0);  // bounded: nothing in the child blocks
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(listener.try_accept()) << "the connection of the child, which was pending";
}

}  // namespace
}  // namespace lockstep::base::net
