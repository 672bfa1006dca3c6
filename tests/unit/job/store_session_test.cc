#include "lockstep/job/store_session.h"

#include <gtest/gtest.h>

namespace lockstep::job {
namespace {

const Credentials kJob{"job", 0, JobKey::random()};

TEST(StoreSession, AStrangerMaySendLittleUntilItHasProvedItsKey) {
  LocalStore store;
  StoreSession session(kJob, 1, store);
  EXPECT_LE(session.room(), 256u);
  const std::string hello = wire::hello(kJob, 0, new_nonce());
  session.receive(hello.substr(0, hello.size() - 1));
  EXPECT_LE(session.room(), 256u - (hello.size() - 1)) << "what has come counts";
  EXPECT_FALSE(session.has_said_hello());
  session.receive(hello.substr(hello.size() - 1));
  EXPECT_TRUE(session.has_said_hello());
  EXPECT_LE(session.room(), 256u);
  EXPECT_FALSE(session.admitted());
  session.receive(std::string(session.room(), 'x'));
  EXPECT_TRUE(session.over());
  EXPECT_EQ(session.room(), 0u);
}

}  // namespace
}  // namespace lockstep::job
