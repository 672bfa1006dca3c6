// A server among strangers: port scans, other jobs, garbage, slow and silent ones; and clients that lose their server.
#include "lockstep/job/store_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/job/store_client.h"
#include "lockstep/job/store_wire.h"

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::CommError;
using base::Deadline;
using base::Fd;
using ::testing::HasSubstr;

const base::Address kAnyPort{"127.0.0.1", 0};
Deadline soon() { return Deadline::in(10s); }

std::string hello(const std::string& job, std::uint16_t protocol = wire::kProtocol) {
  std::string text(wire::kMagic);
  wire::put(text, protocol);
  wire::put(text, static_cast<std::uint8_t>(job.size()));
  return text + job;
}

std::string request(wire::Verb verb, const std::string& key, const std::string& value, std::uint32_t key_size) {
  std::string frame;
  wire::put(frame, verb);
  wire::put(frame, std::uint32_t{0});
  wire::put(frame, key_size);
  frame += key;
  wire::put_text(frame, "");
  frame += value;
  std::string whole;
  wire::put(whole, static_cast<std::uint32_t>(frame.size()));
  return whole + frame;
}

/// Connects and sends `bytes`.
Fd stranger(const StoreServer& server, const std::string& bytes) {
  Fd fd = base::dial(server.address(), soon());
  base::send_all(fd.get(), bytes, soon());
  return fd;
}

/// True when the server has closed the connection; what it said before is skipped.
bool closed(const Fd& fd, Deadline deadline) {
  char bytes[256];
  for (;;) {
    if (!base::wait_readable(fd.get(), deadline)) return false;
    const ssize_t got = ::read(fd.get(), bytes, sizeof bytes);
    if (got <= 0) return true;
  }
}

Cause cause_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const CommError& error) {
    return error.cause();
  }
  return Cause::kInternal;
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages >> pages;
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::chrono::microseconds cpu_time() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return std::chrono::seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(StoreServer, ServesWhatItsOwnerSets) {
  StoreServer server(kAnyPort, "job");
  const auto client = connect_store(server.address(), "job", soon());
  std::thread owner([&] {
    std::this_thread::sleep_for(50ms);  // the client waits by then
    server.store().set("from", "owner", soon());
  });
  const auto begin = Deadline::Clock::now();
  EXPECT_EQ(client->get("from", soon()), "owner");
  EXPECT_LT(Deadline::Clock::now() - begin, 2s) << "found only when the server looked around by itself";
  owner.join();
  client->set("back", "client", soon());
  EXPECT_EQ(server.store().find("back", soon()), "client");
}

TEST(StoreServer, ListensWhereItIsTold) {
  StoreServer server(kAnyPort, "job");
  EXPECT_EQ(server.address().host, "127.0.0.1");
  EXPECT_NE(server.address().port, 0);
  EXPECT_THROW(StoreServer(server.address(), "job"), base::SystemError);
}

TEST(StoreServer, AnotherJobIsTurnedAway) {
  StoreServer server(kAnyPort, "ours");
  const auto begin = Deadline::Clock::now();
  EXPECT_EQ(cause_of([&] { connect_store(server.address(), "theirs", soon()); }), Cause::kBadArg);
  EXPECT_EQ(cause_of([&] { connect_store(server.address(), "", soon()); }), Cause::kBadArg);
  EXPECT_EQ(cause_of([&] { connect_store(server.address(), "ours+", soon()); }), Cause::kBadArg);
  EXPECT_LT(Deadline::Clock::now() - begin, 2s);
}

TEST(StoreServer, TheLongestJobNameIsAllowed) {
  const std::string longest(128, 'j');
  StoreServer server(kAnyPort, longest);
  EXPECT_TRUE(connect_store(server.address(), longest, soon()));
  EXPECT_THROW(connect_store(server.address(), longest + "j", soon()), base::UsageError);
}

TEST(StoreServer, AnotherProtocolIsNamed) {
  StoreServer server(kAnyPort, "job");
  const Fd old = stranger(server, hello("job", 99));
  std::string welcome(wire::kWelcomeSize, '\0');
  ASSERT_TRUE(base::recv_all(old.get(), welcome.data(), welcome.size(), soon()));
  EXPECT_EQ(welcome.back(), static_cast<char>(wire::Verdict::kOtherProtocol));
  EXPECT_TRUE(closed(old, soon()));
}

TEST(StoreServer, SomethingElseAtTheAddressIsNamed) {
  const Fd listener = base::listen_on(kAnyPort);
  std::thread other([&] {
    base::wait_readable(listener.get(), soon());
    const Fd one = base::accept_one(listener.get());
    base::send_all(one.get(), "SSH-2.0-OpenSSH_9.2p1\r\n", soon());
    closed(one, Deadline::in(1s));
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(listener.get()), "job", soon()); }), Cause::kProtocol);
  other.join();
}

TEST(StoreServer, GarbageIsDropped) {
  StoreServer server(kAnyPort, "job");
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    std::string bytes(1 + random() % 400, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    bytes[0] = 'G';
    EXPECT_TRUE(closed(stranger(server, bytes), soon()));
  }
  // A right beginning, then more than a hello may have.
  EXPECT_TRUE(closed(stranger(server, hello(std::string(200, 'j')) + std::string(300, 'x')), soon()));
  EXPECT_TRUE(connect_store(server.address(), "job", soon()));
}

TEST(StoreServer, MalformedRequestsAreRefusedOrDropped) {
  StoreServer server(kAnyPort, "job");
  const auto send_request = [&](const std::string& bytes) {
    Fd fd = stranger(server, hello("job"));
    std::string welcome(wire::kWelcomeSize, '\0');
    EXPECT_TRUE(base::recv_all(fd.get(), welcome.data(), welcome.size(), soon()));
    base::send_all(fd.get(), bytes, soon());
    return fd;
  };
  const auto status = [](const Fd& fd) {
    char reply[5] = {};
    EXPECT_TRUE(base::recv_all(fd.get(), reply, sizeof reply, soon()));
    return static_cast<wire::Status>(reply[4]);
  };
  EXPECT_EQ(status(send_request(request(wire::Verb::kSet, "key", "value", 0xffffffff))), wire::Status::kRefused);
  EXPECT_EQ(status(send_request(request(wire::Verb::kSet, "key", "value", 4000))), wire::Status::kRefused);
  EXPECT_EQ(status(send_request(request(static_cast<wire::Verb>(77), "key", "", 3))), wire::Status::kRefused);
  EXPECT_EQ(status(send_request(request(wire::Verb::kAdd, "key", "many", 3))), wire::Status::kRefused);
  EXPECT_EQ(status(send_request(std::string(4, '\0'))), wire::Status::kRefused);  // an empty frame
  EXPECT_EQ(status(send_request(request(wire::Verb::kSet, "key", std::string(wire::kMaxValue + 1, 'x'), 3))), wire::Status::kRefused);
  EXPECT_TRUE(closed(send_request("\xff\xff\xff\xff"), soon()));  // a frame of 4 GiB
  EXPECT_EQ(server.store().find("key", soon()), std::nullopt);
}

TEST(StoreServer, AHelloMayComeInPieces) {
  StoreServer server(kAnyPort, "job");
  const Fd fd = base::dial(server.address(), soon());
  for (const char c : hello("job")) {
    base::send_all(fd.get(), std::string(1, c), soon());
    std::this_thread::sleep_for(1ms);
  }
  std::string welcome(wire::kWelcomeSize, '\0');
  ASSERT_TRUE(base::recv_all(fd.get(), welcome.data(), welcome.size(), soon()));
  EXPECT_EQ(welcome.back(), static_cast<char>(wire::Verdict::kWelcome));
}

TEST(StoreServer, WhoSaysNothingIsDroppedAfterTwoSeconds) {
  StoreServer server(kAnyPort, "job");
  const Fd silent = base::dial(server.address(), soon());
  const Fd slow = stranger(server, "LOCK");
  EXPECT_FALSE(closed(silent, Deadline::in(1s)));
  EXPECT_TRUE(closed(silent, Deadline::in(3s)));
  EXPECT_TRUE(closed(slow, Deadline::in(1s)));
}

TEST(StoreServer, ACrowdOfStrangersKeepsNobodyOut) {
  StoreServer server(kAnyPort, "job");
  const auto early = connect_store(server.address(), "job", soon());
  std::vector<Fd> crowd;
  const auto crowd_came = Deadline::Clock::now();
  for (int i = 0; i < 200; ++i) crowd.push_back(base::dial(server.address(), soon()));
  const auto begin = Deadline::Clock::now();
  const auto cpu = cpu_time();
  const auto late = connect_store(server.address(), "job", soon());
  late->set("k", "v", soon());
  EXPECT_EQ(early->get("k", soon()), "v");
  EXPECT_LT(Deadline::Clock::now() - begin, 1s) << "the crowd is dropped only after 2 s";
  EXPECT_TRUE(closed(crowd.front(), Deadline::in(1s))) << "the oldest strangers go first";
  EXPECT_LT(Deadline::Clock::now() - crowd_came, 1900ms) << "and do not wait for their 2 s";
  EXPECT_LT(cpu_time() - cpu, 500ms) << "a crowd must not make the server spin";
}

TEST(StoreServer, MemoryDoesNotGrowWithStrangers) {
  StoreServer server(kAnyPort, "job");
  const auto client = connect_store(server.address(), "job", soon());
  const auto scan = [&](int count) {
    for (int i = 0; i < count; ++i) closed(stranger(server, "GET / HTTP/1.1\r\n" + std::string(200, 'x')), soon());
  };
  scan(200);
  const std::size_t before = resident_bytes();
  scan(2000);
  EXPECT_LT(resident_bytes(), before + (1 << 20));
  client->set("k", "v", soon());
}

TEST(StoreServer, ASleepingServerStillTakesAHelloThatCameInTime) {
  // The hello lies in the socket before the server looks: whatever the clock says then, it counts.
  StoreServer server(kAnyPort, "job");
  const Fd fd = stranger(server, "LOCKSTEP");
  std::this_thread::sleep_for(1500ms);
  base::send_all(fd.get(), hello("job").substr(8), soon());
  std::string welcome(wire::kWelcomeSize, '\0');
  EXPECT_TRUE(base::recv_all(fd.get(), welcome.data(), welcome.size(), soon()));
}

TEST(StoreClient, AServerThatGoesIsToldAtOnce) {
  auto server = std::make_unique<StoreServer>(kAnyPort, "job");
  const auto client = connect_store(server->address(), "job", soon());
  Cause waiting_ended = Cause::kInternal;
  std::thread waiter([&] { waiting_ended = cause_of([&] { client->get("never", Deadline::in(60s)); }); });
  while (!client->find("ready", soon()) && client->add("n", 1, soon()) < 3) std::this_thread::sleep_for(5ms);
  const auto begin = Deadline::Clock::now();
  server.reset();
  waiter.join();
  EXPECT_EQ(waiting_ended, Cause::kCoordinatorLost);
  EXPECT_EQ(cause_of([&] { client->set("k", "v", soon()); }), Cause::kCoordinatorLost);
  EXPECT_LT(Deadline::Clock::now() - begin, 8s);
}

TEST(StoreClient, NobodyThereIsNamed) {
  const Fd reserved = base::reserve_port(kAnyPort);
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(reserved.get()), "job", Deadline::in(100ms)); }), Cause::kCoordinatorLost);
}

}  // namespace
}  // namespace lockstep::job
