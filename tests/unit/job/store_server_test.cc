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
#include "lockstep/job/fatal.h"
#include "lockstep/job/store_client.h"
#include "lockstep/job/store_protocol.h"
#include "tests/support/sanitizer_memory.h"

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

const Credentials kJob{"job", 0, JobKey(std::string(32, 'k'))};
const Mac kNonce{};

std::string hello(const std::string& job) { return wire::hello({job, 0, {}}, 0, kNonce); }

std::string body(wire::Verb verb, const std::string& key, const std::string& value, std::uint32_t key_size) {
  std::string frame;
  wire::put(frame, verb);
  wire::put(frame, std::uint32_t{0});
  wire::put(frame, key_size);
  frame += key;
  wire::put_text(frame, "");
  return frame + value;
}

std::string read_bytes(const Fd& fd, std::size_t size) {
  std::string bytes(size, '\0');
  EXPECT_TRUE(base::recv_all(fd.get(), bytes.data(), size, soon()));
  return bytes;
}

wire::Verdict verdict_in(const std::string& challenge) { return static_cast<wire::Verdict>(challenge.at(10)); }

/// A connection that the test drives byte by byte.
struct Admitted {
  Fd fd;
  wire::Seal requests{JobKey(), wire::kRequests};
};

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
  return std::chrono::seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(StoreServer, ServesWhatItsOwnerSets) {
  StoreServer server(kAnyPort, kJob);
  const auto client = connect_store(server.address(), kJob, 0, soon());
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
  StoreServer server(kAnyPort, kJob);
  EXPECT_EQ(server.address().host, "127.0.0.1");
  EXPECT_NE(server.address().port, 0);
  EXPECT_THROW(StoreServer(server.address(), kJob), base::SystemError);
}

/// Says hello with `key` and proves it.
Admitted enter(const StoreServer& server, const JobKey& key) {
  const std::string text = hello("job");
  Fd fd = stranger(server, text);
  const std::string challenge = read_bytes(fd, wire::kChallengeSize);
  EXPECT_EQ(verdict_in(challenge), wire::Verdict::kWelcome);
  const wire::Handshake agreed = wire::handshake(key, text, challenge.substr(0, wire::kChallengeSize - wire::kMac));
  base::send_all(fd.get(), bytes_of(agreed.of_client), soon());
  return {std::move(fd), wire::Seal(agreed.key, wire::kRequests)};
}

TEST(StoreServer, AnotherJobIsTurnedAway) {
  StoreServer server(kAnyPort, {"ours", 0, kJob.key});
  const auto ask = [&](const std::string& job) {
    return cause_of([&] { connect_store(server.address(), {job, 0, kJob.key}, 0, soon()); });
  };
  EXPECT_EQ(ask("theirs"), Cause::kWrongJob);
  EXPECT_EQ(ask(""), Cause::kWrongJob);
  EXPECT_EQ(ask("ours+"), Cause::kWrongJob);
  EXPECT_TRUE(connect_store(server.address(), {"ours", 0, kJob.key}, 0, soon()));
}

TEST(StoreServer, AnotherStartOfTheJobIsTurnedAway) {
  StoreServer server(kAnyPort, {"job", 2, kJob.key});
  for (const int generation : {1, 3}) {
    try {
      connect_store(server.address(), {"job", generation, kJob.key}, 0, soon());
      FAIL() << generation << " was let in";
    } catch (const CommError& error) {
      EXPECT_EQ(error.cause(), Cause::kStaleGen);
      EXPECT_THAT(error.what(),
                  HasSubstr("belongs to start 2 of this job, and this rank to start " + std::to_string(generation)));
    }
  }
  EXPECT_TRUE(connect_store(server.address(), {"job", 2, kJob.key}, 0, soon()));
}

TEST(StoreServer, WhoDoesNotHaveTheKeyIsTurnedAway) {
  StoreServer server(kAnyPort, kJob);
  for (const JobKey& key : {JobKey(), JobKey::random()})
    EXPECT_EQ(cause_of([&] { connect_store(server.address(), {"job", 0, key}, 0, soon()); }), Cause::kAuthFailed);
  ::testing::internal::CaptureStderr();
  Admitted other = enter(server, JobKey::random());
  EXPECT_EQ(static_cast<wire::Verdict>(read_bytes(other.fd, 1)[0]), wire::Verdict::kOtherKey);
  EXPECT_TRUE(closed(other.fd, soon()));
  Admitted again = enter(server, JobKey::random());
  EXPECT_TRUE(closed(again.fd, soon()));
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(told.find("rank 0"), told.rfind("rank 0")) << "it is told once: " << told;
  EXPECT_TRUE(connect_store(server.address(), kJob, 0, soon()));
}

TEST(StoreServer, AServerWithoutTheKeyLearnsNothing) {
  StoreServer server(kAnyPort, {"job", 0, JobKey::random()});
  EXPECT_EQ(cause_of([&] { connect_store(server.address(), kJob, 0, soon()); }), Cause::kAuthFailed);
  // What a rank sends to it is its hello, and no proof.
  const Fd listener = base::listen_on(kAnyPort);
  std::string heard;
  std::thread false_server([&] {
    base::wait_readable(listener.get(), soon());
    const Fd one = base::accept_one(listener.get());
    const std::string text = read_bytes(one, hello("job").size());
    std::string challenge(wire::kMagic);
    wire::put(challenge, wire::kProtocol);
    challenge += std::string(wire::kChallengeSize - challenge.size(), '\0');
    base::send_all(one.get(), challenge, soon());
    heard = read_bytes(one, wire::kMac);
    const wire::Handshake agreed =
        wire::handshake(kJob.key, text, challenge.substr(0, wire::kChallengeSize - wire::kMac));
    EXPECT_FALSE(equal(agreed.of_client, heard));
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(listener.get()), kJob, 0, soon()); }), Cause::kAuthFailed);
  false_server.join();
  EXPECT_EQ(heard, std::string(wire::kMac, '\0'));
}

TEST(StoreServer, WhatWasRecordedIsOfNoUse) {
  StoreServer server(kAnyPort, kJob);
  const std::string text = hello("job");
  Fd first = stranger(server, text);
  const std::string challenge = read_bytes(first, wire::kChallengeSize);
  const wire::Handshake agreed =
      wire::handshake(kJob.key, text, challenge.substr(0, wire::kChallengeSize - wire::kMac));
  base::send_all(first.get(), bytes_of(agreed.of_client), soon());
  EXPECT_EQ(static_cast<wire::Verdict>(read_bytes(first, 1)[0]), wire::Verdict::kWelcome);
  // The same bytes on another connection, before and after the challenge.
  const Fd replayed = stranger(server, text + std::string(bytes_of(agreed.of_client)));
  read_bytes(replayed, wire::kChallengeSize);
  EXPECT_EQ(static_cast<wire::Verdict>(read_bytes(replayed, 1)[0]), wire::Verdict::kOtherKey);
  // A frame on the same connection.
  wire::Seal requests(agreed.key, wire::kRequests);
  const std::string frame = requests.close(body(wire::Verb::kAdd, "n", "1", 1));
  base::send_all(first.get(), frame + frame, soon());
  EXPECT_TRUE(closed(first, soon()));
  EXPECT_EQ(server.store().find("n", soon()), "1");
}

TEST(StoreServer, EveryChangedByteIsFound) {
  StoreServer server(kAnyPort, kJob);
  const std::string request = body(wire::Verb::kSet, "key", "value", 3);
  for (std::size_t at = 0; at < wire::kLength + request.size() + wire::kMac; ++at) {
    Admitted one = enter(server, kJob.key);
    std::string frame = one.requests.close(request);
    frame[at] = static_cast<char>(frame[at] ^ 0x10);
    base::send_all(one.fd.get(), frame, soon());
    EXPECT_TRUE(closed(one.fd, soon())) << "byte " << at;
  }
  EXPECT_EQ(server.store().find("key", soon()), std::nullopt);
}

TEST(StoreServer, AnEndThatNobodyElseSeesIsTold) {
  StoreServer server(kAnyPort, kJob, true);
  auto two = connect_store(server.address(), kJob, 2, soon());
  const auto three = connect_store(server.address(), kJob, 3, soon());
  EXPECT_EQ(three->find(key::exited(2), soon()).value_or(""), "");
  two.reset();
  EXPECT_EQ(three->get(key::exited(2), soon()), key::kClosed);
  EXPECT_EQ(three->find(key::exited(3), soon()).value_or(""), "");
  two = connect_store(server.address(), kJob, 2, soon());
  EXPECT_EQ(two->find(key::exited(2), soon()), "") << "it had only lost its connection";
}

TEST(StoreServer, TheLongestJobNameIsAllowed) {
  const std::string longest(128, 'j');
  StoreServer server(kAnyPort, {longest, 0, {}});
  EXPECT_TRUE(connect_store(server.address(), {longest, 0, {}}, 0, soon()));
  EXPECT_THROW(connect_store(server.address(), {longest + "j", 0, {}}, 0, soon()), base::UsageError);
}

TEST(StoreServer, AnotherProtocolIsNamed) {
  StoreServer server(kAnyPort, kJob);
  std::string text = hello("job");
  text[8] = 99;
  const Fd old = stranger(server, text);
  EXPECT_EQ(verdict_in(read_bytes(old, wire::kVerdictSize)), wire::Verdict::kOtherProtocol);
  EXPECT_TRUE(closed(old, soon()));
}

TEST(StoreClient, AServerOfAnotherProtocolIsNamed) {
  const Fd listener = base::listen_on(kAnyPort);
  std::thread other([&] {
    base::wait_readable(listener.get(), soon());
    const Fd one = base::accept_one(listener.get());
    std::string answer(wire::kMagic);
    wire::put(answer, std::uint16_t{1});
    wire::put(answer, wire::Verdict::kOtherProtocol);
    base::send_all(one.get(), answer, soon());
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(listener.get()), kJob, 0, soon()); }), Cause::kProtocol);
  other.join();
}

TEST(StoreServer, SomethingElseAtTheAddressIsNamed) {
  const Fd listener = base::listen_on(kAnyPort);
  std::thread other([&] {
    base::wait_readable(listener.get(), soon());
    const Fd one = base::accept_one(listener.get());
    base::send_all(one.get(), "SSH-2.0-OpenSSH_9.2p1\r\n", soon());
    closed(one, Deadline::in(1s));
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(listener.get()), kJob, 0, soon()); }), Cause::kProtocol);
  other.join();
}

TEST(StoreServer, GarbageIsDropped) {
  StoreServer server(kAnyPort, kJob);
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    std::string bytes(1 + random() % 400, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    bytes[0] = 'G';
    EXPECT_TRUE(closed(stranger(server, bytes), soon()));
  }
  // A right beginning, then more than a hello may have.
  EXPECT_TRUE(closed(stranger(server, hello(std::string(200, 'j')) + std::string(300, 'x')), soon()));
  EXPECT_TRUE(connect_store(server.address(), kJob, 0, soon()));
}

TEST(StoreServer, MalformedRequestsAreRefusedOrDropped) {
  StoreServer server(kAnyPort, kJob);
  const auto send_body = [&](const std::string& bytes) {
    Admitted one = enter(server, kJob.key);
    read_bytes(one.fd, 1);
    base::send_all(one.fd.get(), one.requests.close(bytes), soon());
    return static_cast<wire::Status>(read_bytes(one.fd, wire::kLength + 1).back());
  };
  EXPECT_EQ(send_body(body(wire::Verb::kSet, "key", "value", 0xffffffff)), wire::Status::kRefused);
  EXPECT_EQ(send_body(body(wire::Verb::kSet, "key", "value", 4000)), wire::Status::kRefused);
  EXPECT_EQ(send_body(body(static_cast<wire::Verb>(77), "key", "", 3)), wire::Status::kRefused);
  EXPECT_EQ(send_body(body(wire::Verb::kAdd, "key", "many", 3)), wire::Status::kRefused);
  EXPECT_EQ(send_body(""), wire::Status::kRefused);
  EXPECT_EQ(send_body(body(wire::Verb::kSet, "key", std::string(wire::kMaxValue + 1, 'x'), 3)), wire::Status::kRefused);
  const Admitted greedy = enter(server, kJob.key);
  base::send_all(greedy.fd.get(), std::string("\xff\xff\xff\xff\0\0\0\0", 8), soon());  // a frame of 4 GiB
  EXPECT_TRUE(closed(greedy.fd, soon()));
  EXPECT_EQ(server.store().find("key", soon()), std::nullopt);
}

TEST(StoreServer, AHelloMayComeInPieces) {
  StoreServer server(kAnyPort, kJob);
  const Fd fd = base::dial(server.address(), soon());
  for (const char c : hello("job")) {
    base::send_all(fd.get(), std::string(1, c), soon());
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(verdict_in(read_bytes(fd, wire::kChallengeSize)), wire::Verdict::kWelcome);
}

TEST(StoreServer, WhoSaysNothingIsDroppedAfterTwoSeconds) {
  StoreServer server(kAnyPort, kJob);
  const Fd silent = base::dial(server.address(), soon());
  const Fd slow = stranger(server, "LOCK");
  EXPECT_FALSE(closed(silent, Deadline::in(1s)));
  EXPECT_TRUE(closed(silent, Deadline::in(3s)));
  EXPECT_TRUE(closed(slow, Deadline::in(1s)));
}

TEST(StoreServer, ACrowdOfStrangersKeepsNobodyOut) {
  StoreServer server(kAnyPort, kJob);
  const auto early = connect_store(server.address(), kJob, 0, soon());
  std::vector<Fd> crowd;
  const auto crowd_came = Deadline::Clock::now();
  for (int i = 0; i < 200; ++i) crowd.push_back(base::dial(server.address(), soon()));
  const auto begin = Deadline::Clock::now();
  const auto cpu = cpu_time();
  const auto late = connect_store(server.address(), kJob, 0, soon());
  late->set("k", "v", soon());
  EXPECT_EQ(early->get("k", soon()), "v");
  EXPECT_LT(Deadline::Clock::now() - begin, 1s) << "the crowd is dropped only after 2 s";
  EXPECT_TRUE(closed(crowd.front(), Deadline::in(1s))) << "the oldest strangers go first";
  EXPECT_LT(Deadline::Clock::now() - crowd_came, 1900ms) << "and do not wait for their 2 s";
  EXPECT_LT(cpu_time() - cpu, 500ms) << "a crowd must not make the server spin";
}

TEST(StoreServer, MemoryDoesNotGrowWithStrangers) {
  StoreServer server(kAnyPort, kJob);
  const auto client = connect_store(server.address(), kJob, 0, soon());
  const auto scan = [&](int count) {
    for (int i = 0; i < count; ++i) closed(stranger(server, "GET / HTTP/1.1\r\n" + std::string(200, 'x')), soon());
  };
  scan(200);
  const std::size_t before = resident_bytes();
  scan(2000);
  EXPECT_LT(resident_bytes(), before + (1 << 20) + tests::kKeptBack);
  client->set("k", "v", soon());
}

TEST(StoreServer, ASleepingServerStillTakesAHelloThatCameInTime) {
  // The hello lies in the socket before the server looks: whatever the clock says then, it counts.
  StoreServer server(kAnyPort, kJob);
  const Fd fd = stranger(server, "LOCKSTEP");
  std::this_thread::sleep_for(1500ms);
  base::send_all(fd.get(), hello("job").substr(8), soon());
  EXPECT_EQ(verdict_in(read_bytes(fd, wire::kChallengeSize)), wire::Verdict::kWelcome);
}

TEST(StoreClient, AServerThatGoesIsToldAtOnce) {
  auto server = std::make_unique<StoreServer>(kAnyPort, kJob);
  const auto client = connect_store(server->address(), kJob, 0, soon());
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

TEST(StoreClient, AnotherServerInItsPlaceIsNotTaken) {
  auto server = std::make_unique<StoreServer>(kAnyPort, kJob);
  const base::Address address = server->address();
  const auto client = connect_store(address, kJob, 1, soon());
  client->set("k", "v", soon());
  server.reset();
  StoreServer next(address, kJob);  // the same job, started again
  try {
    client->set("k", "old", soon());
    FAIL() << "it was taken";
  } catch (const CommError& error) {
    EXPECT_EQ(error.cause(), Cause::kCoordinatorLost);
    EXPECT_THAT(error.what(), HasSubstr("another one has taken its place"));
  }
  EXPECT_EQ(cause_of([&] { client->set("k", "old", soon()); }), Cause::kCoordinatorLost);
  EXPECT_EQ(next.store().find("k", soon()), std::nullopt);
  EXPECT_TRUE(connect_store(address, kJob, 1, soon()));
}

TEST(StoreClient, AConnectionThatIsClosedBeforeItIsAdmittedIsTriedAgain) {
  StoreServer server(kAnyPort, kJob);
  const Fd listener = base::listen_on(kAnyPort);
  int refused = 0;
  std::thread crowded([&] {
    for (; refused < 2; ++refused) {
      base::wait_readable(listener.get(), soon());
      const Fd one = base::accept_one(listener.get());
      read_bytes(one, hello("job").size());
    }
  });
  // One that always closes is named in the end.
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(listener.get()), kJob, 0, Deadline::in(1s)); }),
            Cause::kCoordinatorLost);
  crowded.join();
  EXPECT_EQ(refused, 2);
}

TEST(StoreClient, NobodyThereIsNamed) {
  const Fd reserved = base::reserve_port(kAnyPort);
  EXPECT_EQ(cause_of([&] { connect_store(base::local_address(reserved.get()), kJob, 0, Deadline::in(100ms)); }),
            Cause::kCoordinatorLost);
}

}  // namespace
}  // namespace lockstep::job
