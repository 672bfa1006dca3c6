#include "lockstep/job/store_session.h"

#include <gtest/gtest.h>

namespace lockstep::job {
namespace {

const Credentials kCredentials{"job", 0, JobKey::random()};

TEST(StoreSession, LimitsInputBeforeAuthentication) {
  LocalStore store;
  StoreSession session(kCredentials, 1, store);
  EXPECT_LE(session.receive_capacity(), 256u);
  const std::string hello = store_protocol::make_hello(kCredentials, 0, random_nonce());
  session.receive(hello.substr(0, hello.size() - 1));
  EXPECT_LE(session.receive_capacity(), 256u - (hello.size() - 1)) << "bytes received before count";
  EXPECT_FALSE(session.has_received_hello());
  session.receive(hello.substr(hello.size() - 1));
  EXPECT_TRUE(session.has_received_hello());
  EXPECT_LE(session.receive_capacity(), 256u);
  EXPECT_FALSE(session.is_authenticated());
  session.receive(std::string(session.receive_capacity(), 'x'));
  EXPECT_TRUE(session.is_closed());
  EXPECT_EQ(session.receive_capacity(), 0u);
}

}  // namespace
}  // namespace lockstep::job
