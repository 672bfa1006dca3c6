// Tests the store over a network that corrupts and interrupts its connections.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/store_client.h"
#include "lockstep/job/store_protocol.h"
#include "lockstep/job/store_server.h"
#include "tests/support/fault_proxy.h"
#include "tests/unit/job/store_job.h"

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::CommError;
using base::Deadline;
using tests::FaultProxy;

struct FaultyStore {
  StoreServer server{{"127.0.0.1", 0}, kTestJob, 1, true};
  FaultProxy proxy{server.address()};
};

TEST(StoreOverFaultyNetwork, WorksWithOneByteSegments) {
  FaultyStore faulty;
  faulty.proxy.send_byte_by_byte();
  const auto client = connect_store(faulty.proxy.address(), kTestJob, 1, within_10s());
  const std::string value(5000, 'v');
  client->set("key", value, within_10s());
  EXPECT_EQ(client->get("key", within_10s()), value);
  EXPECT_EQ(client->add("n", 3, within_10s()), 3);
}

constexpr FaultProxy::CloseMode kCloseModes[] = {FaultProxy::CloseMode::kReset, FaultProxy::CloseMode::kFinish,
                                                 FaultProxy::CloseMode::kHalfClose};

TEST(StoreOverFaultyNetwork, LostConnectionIsReplaced) {
  for (const auto how : kCloseModes) {
    FaultyStore faulty;
    const auto client = connect_store(faulty.proxy.address(), kTestJob, 1, within_10s());
    client->set("key", "value", within_10s());
    faulty.proxy.close_connections(how);
    EXPECT_EQ(client->get("key", within_10s()), "value");
    EXPECT_EQ(faulty.server.store().find(key::exited(1), within_10s()).value_or(""), "");
    std::optional<std::string> waited;
    std::thread waiter([&] { waited = client->get("late", Deadline::in(30s)); });
    std::this_thread::sleep_for(20ms);  // so that it usually waits by then; the test holds either way
    faulty.proxy.close_connections(how);
    client->set("late", "now", within_10s());
    waiter.join();
    EXPECT_EQ(waited, "now");
    // A request that may have been lost is repeated, but the store must not add twice.
    faulty.proxy.close_connections(how);
    try {
      client->add("n", 1, within_10s());
    } catch (const CommError& error) {
      EXPECT_EQ(error.cause(), Cause::kCoordinatorLost);
    }
    EXPECT_LE(faulty.server.store().add("n", 0, within_10s()), 1);
  }
}

TEST(StoreOverFaultyNetwork, PermanentLossIsSeenAtOnceByBothSides) {
  for (const auto how : kCloseModes) {
    StoreServer server{{"127.0.0.1", 0}, kTestJob, 1, true};
    auto proxy = std::make_unique<FaultProxy>(server.address());
    const auto client = connect_store(proxy->address(), kTestJob, 1, within_10s());
    Cause cause = Cause::kInternal;
    std::thread waiter([&] {
      try {
        client->get("never", Deadline::in(60s));
      } catch (const CommError& error) {
        cause = error.cause();
      }
    });
    std::this_thread::sleep_for(50ms);  // so that the request has usually arrived; the test holds either way
    const auto begin = Deadline::Clock::now();
    proxy->stop_listening();
    proxy->close_connections(how);
    waiter.join();
    EXPECT_EQ(cause, Cause::kCoordinatorLost);
    EXPECT_EQ(server.store().get(key::exited(1), Deadline::in(1s)), encode(ExitRecord{.kind = ExitKind::kClosed}));
    EXPECT_LT(Deadline::Clock::now() - begin, 1s);
  }
}

/// The number of bytes in each direction of a connection on which a client sets "key" and adds to "n".
struct Traffic {
  std::uint64_t to_server, to_client;
};
Traffic traffic() {
  const std::uint64_t frame = 8 + store_protocol::kMacBytes;
  return {store_protocol::make_hello(kTestJob, 1, Mac{}).size() + store_protocol::kMacBytes + 2 * (frame + 13) + 3 + 5 +
              1 + 1,
          store_protocol::kChallengeBytes + 1 + 2 * (frame + 1) + 1};
}

/// Flips one random bit in one direction of each of 500 connections.
void expect_flipped_bits_are_detected(bool to_server) {
  std::mt19937 random(11);
  ::testing::internal::CaptureStderr();
  int found = 0;
  for (int i = 0; i < 500; ++i) {
    FaultyStore faulty;
    const Traffic all = traffic();
    faulty.proxy.flip_bit(to_server, random() % (to_server ? all.to_server : all.to_client),
                          static_cast<int>(random() % 8));
    const auto begin = Deadline::Clock::now();
    try {
      const auto client = connect_store(faulty.proxy.address(), kTestJob, 1, Deadline::in(5s));
      client->set("key", "value", within_10s());
      client->add("n", 1, within_10s());
    } catch (const base::Error&) {
      ++found;
    }
    EXPECT_LT(Deadline::Clock::now() - begin, 3s) << "run " << i;
    // The store accepted only unchanged values.
    EXPECT_EQ(faulty.server.store().find("key", within_10s()).value_or("value"), "value");
    EXPECT_EQ(faulty.server.store().find("n", within_10s()).value_or("1"), "1");
  }
  ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(found, 500);
}

TEST(StoreOverFaultyNetwork, FlippedBitsOfRequestsAreDetected) { expect_flipped_bits_are_detected(true); }
TEST(StoreOverFaultyNetwork, FlippedBitsOfResponsesAreDetected) { expect_flipped_bits_are_detected(false); }

}  // namespace
}  // namespace lockstep::job
