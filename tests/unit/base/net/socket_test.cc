#include "lockstep/base/net/socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <optional>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::base::net {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using tests::message_of;

const Address kAnyPort{"127.0.0.1", 0};

struct ConnectedPair {
  Fd listener = listen_on(kAnyPort);
  Fd client = connect_to(local_address(listener.get()), Deadline::in(5s));
  Fd server;
  ConnectedPair() {
    wait_readable(listener.get(), Deadline::in(5s));
    server = try_accept(listener.get());
  }
};

TEST(Socket, ParsesAndPrintsAddresses) {
  EXPECT_EQ(to_string(parse_address("x", "alpha:80")), "alpha:80");
  EXPECT_EQ(to_string(parse_address("x", "[::1]:65535")), "[::1]:65535");
  EXPECT_EQ(parse_address("x", "[::1]:1").host, "::1");
  for (const char* const text : {"", ":", "alpha", ":80", "alpha:"})
    EXPECT_THROW(parse_address("x", text), UsageError) << text;
  for (const char* const port : {"0", "65536", "123456", "-1", "12a", " 80"})
    EXPECT_THAT(
        message_of<UsageError>([&] { parse_address("LOCKSTEP_STORE", "alpha:" + std::string(port)); }),
        HasSubstr("the port in LOCKSTEP_STORE is \"" + std::string(port) + "\"; expected an integer from 1 to 65535"));
}

TEST(Socket, SendsAndReceivesAllBytes) {
  ConnectedPair c;
  const std::string sent(1 << 20, 'x');
  std::thread sender([&] { send_all(c.client.get(), sent, Deadline::in(10s)); });
  std::string got(sent.size(), '\0');
  EXPECT_TRUE(recv_all(c.server.get(), got.data(), got.size(), Deadline::in(10s)));
  sender.join();
  EXPECT_EQ(got, sent);
  EXPECT_EQ(peer_address(c.client.get()).port, local_address(c.server.get()).port);
}

TEST(Socket, DescriptorsAreCloseOnExec) {
  ConnectedPair c;
  for (const Fd* fd : {&c.listener, &c.client, &c.server}) EXPECT_TRUE(::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC);
}

TEST(Socket, WaitsEndAtTheirDeadline) {
  ConnectedPair c;
  char byte;
  EXPECT_FALSE(wait_readable(c.server.get(), Deadline::in(10ms)));
  EXPECT_TRUE(wait_writable(c.server.get(), Deadline::in(10ms)));
  const auto error = tests::thrown<SystemError>([&] { recv_all(c.server.get(), &byte, 1, Deadline::in(10ms)); });
  EXPECT_EQ(error.error_number(), ETIMEDOUT);
  EXPECT_EQ(error.cause(), Cause::kRankStuck);
  // The peer does not read, so the buffers fill.
  EXPECT_THROW(send_all(c.client.get(), std::string(64 << 20, 'x'), Deadline::in(50ms)), SystemError);
}

TEST(Socket, DistinguishesEndFromTruncatedMessage) {
  ConnectedPair c;
  char bytes[4];
  send_all(c.client.get(), "ab", Deadline::in(1s));
  c.client.reset();
  EXPECT_THROW(recv_all(c.server.get(), bytes, 4, Deadline::in(1s)), SystemError);
  EXPECT_FALSE(recv_all(c.server.get(), bytes, 4, Deadline::in(1s)));
}

TEST(Socket, PortInUseIsReported) {
  const Fd listener = listen_on(kAnyPort);
  const Address taken = local_address(listener.get());
  const auto error = tests::thrown<SystemError>([&] { listen_on(taken); });
  EXPECT_EQ(error.cause(), Cause::kPortInUse);
  EXPECT_THAT(error.what(), HasSubstr(to_string(taken)));
}

TEST(Socket, ReservedPortCanBeListenedOn) {
  const Fd reserved = reserve_port(kAnyPort);
  const Address address = local_address(reserved.get());
  const Fd listener = listen_on(address);
  EXPECT_EQ(local_address(listener.get()).port, address.port);
  EXPECT_TRUE(connect_to(address, Deadline::in(1s)));
}

TEST(Socket, ConnectRetriesUntilAccepted) {
  const Fd reserved = reserve_port(kAnyPort);
  const Address address = local_address(reserved.get());
  std::optional<Fd> listener;
  std::thread late([&] {
    std::this_thread::sleep_for(100ms);
    listener = listen_on(address);
  });
  EXPECT_TRUE(connect_to(address, Deadline::in(10s)));
  late.join();
}

TEST(Socket, ConnectTimeoutNamesTheAddress) {
  const Fd reserved = reserve_port(kAnyPort);
  const Address address = local_address(reserved.get());
  const auto begin = Deadline::Clock::now();
  const auto error = tests::thrown<PeerLostError>([&] { connect_to(address, Deadline::in(100ms)); });
  EXPECT_EQ(error.cause(), Cause::kCoordinatorLost);
  EXPECT_THAT(error.what(), HasSubstr("cannot connect to " + to_string(address) + ": Connection refused"));
  EXPECT_LT(Deadline::Clock::now() - begin, 3s);
  EXPECT_THROW(connect_to({"no such host", 80}, Deadline::in(1s)), UsageError);
}

TEST(Socket, TryAcceptDoesNotBlock) {
  const Fd listener = listen_on(kAnyPort);
  EXPECT_FALSE(try_accept(listener.get()));
}

TEST(Socket, NameIsResolvedAgainUntilTheDeadline) {
  const std::string name(70, 'a');  // too long for a label, so the resolver asks no server
  const auto begin = std::chrono::steady_clock::now();
  const std::string text = message_of<UsageError>([&] { connect_to({name, 1}, Deadline::in(1200ms)); });
  EXPECT_THAT(text, HasSubstr("cannot resolve host \"" + name));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 500ms) << "it was tried twice";
}

}  // namespace
}  // namespace lockstep::base::net
