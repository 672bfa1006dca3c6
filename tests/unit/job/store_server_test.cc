// Tests StoreServer with port scans, other jobs, garbage, and slow or silent connections; and clients that lose their
// server.
#include "lockstep/job/store_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <random>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/store_client.h"
#include "lockstep/job/store_protocol.h"
#include "tests/support/sanitizer.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/job/store_job.h"

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::CommError;
using base::Deadline;
using base::Fd;
using ::testing::HasSubstr;

const base::net::Address kAnyPort{"127.0.0.1", 0};

const Mac kNonce{};

std::string hello(const std::string& job) { return store_protocol::make_hello({job, 0, {}}, 0, kNonce); }

std::string body(store_protocol::StoreOperation operation, const std::string& key, const std::string& value,
                 std::uint32_t key_size) {
  std::string frame;
  base::put_number(frame, operation);
  base::put_number(frame, std::uint32_t{0});
  base::put_number(frame, key_size);
  frame += key;
  base::put_text(frame, "");
  return frame + value;
}

std::string read_bytes(const Fd& fd, std::size_t size) {
  std::string bytes(size, '\0');
  EXPECT_TRUE(base::net::recv_all(fd.get(), bytes.data(), size, within_10s()));
  return bytes;
}

store_protocol::HandshakeResult handshake_result_in(const std::string& challenge) {
  return static_cast<store_protocol::HandshakeResult>(challenge.at(10));
}

/// A connection that the test drives byte by byte.
struct RawConnection {
  Fd fd;
  store_protocol::FrameAuthenticator requests{JobKey(), store_protocol::kRequestDirection};
};

/// Connects and sends `bytes`.
Fd connect_and_send(const StoreServer& server, const std::string& bytes) {
  Fd fd = base::net::connect_to(server.address(), within_10s());
  base::net::send_all(fd.get(), bytes, within_10s());
  return fd;
}

/// Returns whether the server closes the connection before the deadline. Discards the bytes that it sends before.
bool is_closed_by_server(const Fd& fd, Deadline deadline) {
  char bytes[256];
  for (;;) {
    if (!base::net::wait_readable(fd.get(), deadline)) return false;
    const ssize_t got = ::read(fd.get(), bytes, sizeof bytes);
    if (got <= 0) return true;
  }
}

Cause cause_of(const std::function<void()>& action) { return tests::thrown<CommError>(action).cause(); }

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

TEST(StoreServer, ServesValuesSetByItsOwner) {
  StoreServer server(kAnyPort, kTestJob);
  const auto client = connect_store(server.address(), kTestJob, 0, within_10s());
  std::thread owner([&] {
    std::this_thread::sleep_for(50ms);  // so that the client waits by then
    server.store().set("from", "owner", within_10s());
  });
  const auto begin = Deadline::Clock::now();
  EXPECT_EQ(client->get("from", within_10s()), "owner");
  EXPECT_LT(Deadline::Clock::now() - begin, 2s) << "the server noticed the change only at its own timeout";
  owner.join();
  client->set("back", "client", within_10s());
  EXPECT_EQ(server.store().find("back", within_10s()), "client");
}

TEST(StoreServer, ListensOnTheGivenAddress) {
  StoreServer server(kAnyPort, kTestJob);
  EXPECT_EQ(server.address().host, "127.0.0.1");
  EXPECT_NE(server.address().port, 0);
  EXPECT_THROW(StoreServer(server.address(), kTestJob), base::SystemError);
}

/// Connects, sends a hello, and authenticates with `key`.
RawConnection authenticate(const StoreServer& server, const JobKey& key) {
  const std::string text = hello("job");
  Fd fd = connect_and_send(server, text);
  const std::string challenge = read_bytes(fd, store_protocol::kChallengeBytes);
  EXPECT_EQ(handshake_result_in(challenge), store_protocol::HandshakeResult::kAccepted);
  const store_protocol::Handshake derived = store_protocol::derive_handshake(
      key, text, challenge.substr(0, store_protocol::kChallengeBytes - store_protocol::kMacBytes));
  base::net::send_all(fd.get(), mac_bytes(derived.client_proof), within_10s());
  return {std::move(fd), store_protocol::FrameAuthenticator(derived.key, store_protocol::kRequestDirection)};
}

TEST(StoreServer, RefusesAnotherJob) {
  StoreServer server(kAnyPort, {"ours", 0, kTestJob.key});
  const auto ask = [&](const std::string& job) {
    return cause_of([&] { connect_store(server.address(), {job, 0, kTestJob.key}, 0, within_10s()); });
  };
  EXPECT_EQ(ask("theirs"), Cause::kWrongJob);
  EXPECT_EQ(ask(""), Cause::kWrongJob);
  EXPECT_EQ(ask("ours+"), Cause::kWrongJob);
  EXPECT_TRUE(connect_store(server.address(), {"ours", 0, kTestJob.key}, 0, within_10s()));
}

TEST(StoreServer, RefusesAnotherGeneration) {
  StoreServer server(kAnyPort, {"job", 2, kTestJob.key});
  for (const int generation : {1, 3}) {
    const auto error = tests::thrown<CommError>(
        [&] { connect_store(server.address(), {"job", generation, kTestJob.key}, 0, within_10s()); });
    EXPECT_EQ(error.cause(), Cause::kStaleGen);
    EXPECT_THAT(error.what(), HasSubstr("belongs to generation 2 of this job, but this rank belongs to generation " +
                                        std::to_string(generation)));
  }
  EXPECT_TRUE(connect_store(server.address(), {"job", 2, kTestJob.key}, 0, within_10s()));
}

TEST(StoreServer, RefusesAWrongKey) {
  StoreServer server(kAnyPort, kTestJob);
  for (const JobKey& key : {JobKey(), JobKey::random()})
    EXPECT_EQ(cause_of([&] { connect_store(server.address(), {"job", 0, key}, 0, within_10s()); }), Cause::kAuthFailed);
  ::testing::internal::CaptureStderr();
  RawConnection other = authenticate(server, JobKey::random());
  EXPECT_EQ(static_cast<store_protocol::HandshakeResult>(read_bytes(other.fd, 1)[0]),
            store_protocol::HandshakeResult::kOtherKey);
  EXPECT_TRUE(is_closed_by_server(other.fd, within_10s()));
  RawConnection again = authenticate(server, JobKey::random());
  EXPECT_TRUE(is_closed_by_server(again.fd, within_10s()));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.find("rank 0"), log.rfind("rank 0")) << "logged more than once: " << log;
  EXPECT_TRUE(connect_store(server.address(), kTestJob, 0, within_10s()));
}

TEST(StoreServer, ImpostorServerLearnsNothing) {
  StoreServer server(kAnyPort, {"job", 0, JobKey::random()});
  EXPECT_EQ(cause_of([&] { connect_store(server.address(), kTestJob, 0, within_10s()); }), Cause::kAuthFailed);
  // A rank sends only its hello to the impostor, and no proof of the key.
  const Fd listener = base::net::listen_on(kAnyPort);
  std::string proof;
  std::thread impostor([&] {
    base::net::wait_readable(listener.get(), within_10s());
    const Fd one = base::net::try_accept(listener.get());
    const std::string text = read_bytes(one, hello("job").size());
    std::string challenge(store_protocol::kMagic);
    base::put_number(challenge, store_protocol::kProtocol);
    challenge += std::string(store_protocol::kChallengeBytes - challenge.size(), '\0');
    base::net::send_all(one.get(), challenge, within_10s());
    proof = read_bytes(one, store_protocol::kMacBytes);
    const store_protocol::Handshake derived = store_protocol::derive_handshake(
        kTestJob.key, text, challenge.substr(0, store_protocol::kChallengeBytes - store_protocol::kMacBytes));
    EXPECT_FALSE(equal_constant_time(derived.client_proof, proof));
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::net::local_address(listener.get()), kTestJob, 0, within_10s()); }),
            Cause::kAuthFailed);
  impostor.join();
  EXPECT_EQ(proof, std::string(store_protocol::kMacBytes, '\0'));
}

TEST(StoreServer, ReplayedBytesAreRefused) {
  StoreServer server(kAnyPort, kTestJob);
  const std::string text = hello("job");
  Fd first = connect_and_send(server, text);
  const std::string challenge = read_bytes(first, store_protocol::kChallengeBytes);
  const store_protocol::Handshake derived = store_protocol::derive_handshake(
      kTestJob.key, text, challenge.substr(0, store_protocol::kChallengeBytes - store_protocol::kMacBytes));
  base::net::send_all(first.get(), mac_bytes(derived.client_proof), within_10s());
  EXPECT_EQ(static_cast<store_protocol::HandshakeResult>(read_bytes(first, 1)[0]),
            store_protocol::HandshakeResult::kAccepted);
  // Replays the handshake on another connection.
  const Fd replayed = connect_and_send(server, text + std::string(mac_bytes(derived.client_proof)));
  read_bytes(replayed, store_protocol::kChallengeBytes);
  EXPECT_EQ(static_cast<store_protocol::HandshakeResult>(read_bytes(replayed, 1)[0]),
            store_protocol::HandshakeResult::kOtherKey);
  // Replays a frame on the same connection.
  store_protocol::FrameAuthenticator requests(derived.key, store_protocol::kRequestDirection);
  const std::string frame = requests.make_frame(body(store_protocol::StoreOperation::kAdd, "n", "1", 1));
  base::net::send_all(first.get(), frame + frame, within_10s());
  EXPECT_TRUE(is_closed_by_server(first, within_10s()));
  EXPECT_EQ(server.store().find("n", within_10s()), "1");
}

TEST(StoreServer, ChangedBytesAreDetected) {
  StoreServer server(kAnyPort, kTestJob);
  const std::string request = body(store_protocol::StoreOperation::kSet, "key", "value", 3);
  for (std::size_t at = 0; at < store_protocol::kLengthBytes + request.size() + store_protocol::kMacBytes; ++at) {
    RawConnection one = authenticate(server, kTestJob.key);
    std::string frame = one.requests.make_frame(request);
    frame[at] = static_cast<char>(frame[at] ^ 0x10);
    base::net::send_all(one.fd.get(), frame, within_10s());
    EXPECT_TRUE(is_closed_by_server(one.fd, within_10s())) << "byte " << at;
  }
  EXPECT_EQ(server.store().find("key", within_10s()), std::nullopt);
}

TEST(StoreServer, PublishesRankExits) {
  StoreServer server(kAnyPort, kTestJob, 1, true);
  auto two = connect_store(server.address(), kTestJob, 2, within_10s());
  const auto three = connect_store(server.address(), kTestJob, 3, within_10s());
  EXPECT_EQ(three->find(key::exited(2), within_10s()).value_or(""), "");
  two.reset();
  EXPECT_EQ(three->get(key::exited(2), within_10s()), encode(ExitRecord{.kind = ExitKind::kClosed}));
  EXPECT_EQ(three->find(key::exited(3), within_10s()).value_or(""), "");
  two = connect_store(server.address(), kTestJob, 2, within_10s());
  EXPECT_EQ(two->find(key::exited(2), within_10s()), std::nullopt) << "the rank had only lost its connection";
}

TEST(StoreServer, AcceptsTheLongestJobName) {
  const std::string longest(128, 'j');
  StoreServer server(kAnyPort, {longest, 0, {}});
  EXPECT_TRUE(connect_store(server.address(), {longest, 0, {}}, 0, within_10s()));
  EXPECT_THROW(connect_store(server.address(), {longest + "j", 0, {}}, 0, within_10s()), base::UsageError);
}

TEST(StoreServer, RefusesAnotherProtocol) {
  StoreServer server(kAnyPort, kTestJob);
  std::string text = hello("job");
  text[8] = 99;
  const Fd old = connect_and_send(server, text);
  EXPECT_EQ(handshake_result_in(read_bytes(old, store_protocol::kChallengePrefixBytes)),
            store_protocol::HandshakeResult::kOtherProtocol);
  EXPECT_TRUE(is_closed_by_server(old, within_10s()));
}

TEST(StoreClient, ReportsAServerOfAnotherProtocol) {
  const Fd listener = base::net::listen_on(kAnyPort);
  std::thread other([&] {
    base::net::wait_readable(listener.get(), within_10s());
    const Fd one = base::net::try_accept(listener.get());
    std::string answer(store_protocol::kMagic);
    base::put_number(answer, std::uint16_t{1});
    base::put_number(answer, store_protocol::HandshakeResult::kOtherProtocol);
    base::net::send_all(one.get(), answer, within_10s());
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::net::local_address(listener.get()), kTestJob, 0, within_10s()); }),
            Cause::kProtocol);
  other.join();
}

TEST(StoreServer, ReportsAServerThatIsNotAStore) {
  const Fd listener = base::net::listen_on(kAnyPort);
  std::thread other([&] {
    base::net::wait_readable(listener.get(), within_10s());
    const Fd one = base::net::try_accept(listener.get());
    base::net::send_all(one.get(), "SSH-2.0-OpenSSH_9.2p1\r\n", within_10s());
    is_closed_by_server(one, Deadline::in(1s));
  });
  EXPECT_EQ(cause_of([&] { connect_store(base::net::local_address(listener.get()), kTestJob, 0, within_10s()); }),
            Cause::kProtocol);
  other.join();
}

TEST(StoreServer, DropsGarbage) {
  StoreServer server(kAnyPort, kTestJob);
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    std::string bytes(1 + random() % 400, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    bytes[0] = 'G';
    EXPECT_TRUE(is_closed_by_server(connect_and_send(server, bytes), within_10s()));
  }
  // A valid beginning, followed by more bytes than a hello may have.
  EXPECT_TRUE(is_closed_by_server(connect_and_send(server, hello(std::string(200, 'j')) + std::string(300, 'x')),
                                  within_10s()));
  EXPECT_TRUE(connect_store(server.address(), kTestJob, 0, within_10s()));
}

TEST(StoreServer, RefusesOrDropsMalformedRequests) {
  StoreServer server(kAnyPort, kTestJob);
  const auto send_body = [&](const std::string& bytes) {
    RawConnection one = authenticate(server, kTestJob.key);
    read_bytes(one.fd, 1);
    base::net::send_all(one.fd.get(), one.requests.make_frame(bytes), within_10s());
    return static_cast<store_protocol::ReplyStatus>(read_bytes(one.fd, store_protocol::kLengthBytes + 1).back());
  };
  EXPECT_EQ(send_body(body(store_protocol::StoreOperation::kSet, "key", "value", 0xffffffff)),
            store_protocol::ReplyStatus::kRefused);
  EXPECT_EQ(send_body(body(store_protocol::StoreOperation::kSet, "key", "value", 4000)),
            store_protocol::ReplyStatus::kRefused);
  EXPECT_EQ(send_body(body(static_cast<store_protocol::StoreOperation>(77), "key", "", 3)),
            store_protocol::ReplyStatus::kRefused);
  EXPECT_EQ(send_body(body(store_protocol::StoreOperation::kAdd, "key", "many", 3)),
            store_protocol::ReplyStatus::kRefused);
  EXPECT_EQ(send_body(""), store_protocol::ReplyStatus::kRefused);
  EXPECT_EQ(send_body(body(store_protocol::StoreOperation::kSet, "key", std::string(kMaxValueBytes + 1, 'x'), 3)),
            store_protocol::ReplyStatus::kRefused);
  const RawConnection greedy = authenticate(server, kTestJob.key);
  base::net::send_all(greedy.fd.get(), std::string("\xff\xff\xff\xff\0\0\0\0", 8), within_10s());  // a frame of 4 GiB
  EXPECT_TRUE(is_closed_by_server(greedy.fd, within_10s()));
  EXPECT_EQ(server.store().find("key", within_10s()), std::nullopt);
}

TEST(StoreServer, AcceptsAFragmentedHello) {
  StoreServer server(kAnyPort, kTestJob);
  const Fd fd = base::net::connect_to(server.address(), within_10s());
  for (const char c : hello("job")) {
    base::net::send_all(fd.get(), std::string(1, c), within_10s());
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(handshake_result_in(read_bytes(fd, store_protocol::kChallengeBytes)),
            store_protocol::HandshakeResult::kAccepted);
}

TEST(StoreServer, DropsSilentConnectionsAfterTwoSeconds) {
  StoreServer server(kAnyPort, kTestJob);
  const Fd silent = base::net::connect_to(server.address(), within_10s());
  const Fd slow = connect_and_send(server, "LOCK");
  EXPECT_FALSE(is_closed_by_server(silent, Deadline::in(1s)));
  EXPECT_TRUE(is_closed_by_server(silent, Deadline::in(3s)));
  EXPECT_TRUE(is_closed_by_server(slow, Deadline::in(1s)));
}

TEST(StoreServer, UnauthenticatedFloodDoesNotLockOutRanks) {
  StoreServer server(kAnyPort, kTestJob);
  const auto early = connect_store(server.address(), kTestJob, 0, within_10s());
  std::vector<Fd> flood;
  const auto flood_begin = Deadline::Clock::now();
  for (int i = 0; i < 200; ++i) flood.push_back(base::net::connect_to(server.address(), within_10s()));
  const auto begin = Deadline::Clock::now();
  const auto cpu = cpu_time();
  const auto late = connect_store(server.address(), kTestJob, 0, within_10s());
  late->set("k", "v", within_10s());
  EXPECT_EQ(early->get("k", within_10s()), "v");
  EXPECT_LT(Deadline::Clock::now() - begin, 1s) << "the flood is dropped only after 2 s";
  EXPECT_TRUE(is_closed_by_server(flood.front(), Deadline::in(1s))) << "the oldest connections are not dropped first";
  EXPECT_LT(Deadline::Clock::now() - flood_begin, 1900ms) << "they are dropped only after 2 s";
  EXPECT_LT(cpu_time() - cpu, 500ms) << "the flood makes the server spin";
}

// The hosts of a large job are busy when its ranks start, so that many have connected and not yet sent their proofs.
TEST(StoreServer, AllRanksMayAuthenticateAtOnce) {
  constexpr int kRanks = 200;
  StoreServer server(kAnyPort, kTestJob, kRanks);
  std::vector<Fd> ranks;
  for (int i = 0; i < kRanks; ++i) ranks.push_back(connect_and_send(server, hello("job")));
  for (const Fd& rank : ranks)
    EXPECT_EQ(handshake_result_in(read_bytes(rank, store_protocol::kChallengeBytes)),
              store_protocol::HandshakeResult::kAccepted);
  EXPECT_FALSE(is_closed_by_server(ranks.front(), Deadline::in(200ms)));
}

// More than a server for one rank keeps before they have authenticated. Each waits for one of two keys, and is answered
// when that key changes or its time is over, whatever the others wait for.
TEST(StoreServer, HundredsOfRanksConnectAtOnceAndWait) {
  constexpr int kRanks = 300;
  StoreServer server(kAnyPort, kTestJob);
  std::vector<std::string> got(kRanks);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&, rank] {
        const auto store = connect_store(server.address(), kTestJob, rank, Deadline::in(60s));
        if (rank % 3 == 2) got[static_cast<std::size_t>(rank)] = store->get("never", Deadline::in(100ms)).value_or("-");
        store->add("arrived", 1, Deadline::in(60s));
        if (rank % 3 == 2) return;
        got[static_cast<std::size_t>(rank)] = store->get(rank % 3 == 0 ? "a" : "b", Deadline::in(60s)).value_or("-");
      });
    ASSERT_TRUE(base::poll_until(Deadline::in(60s), 1ms, [&] {
      return server.store().find("arrived", within_10s()).value_or("") == std::to_string(kRanks);
    }));
    server.store().set("a", "1", within_10s());  // by another thread than the server's
    connect_store(server.address(), kTestJob, 0, within_10s())->set("b", "2", within_10s());
  }
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(got[static_cast<std::size_t>(rank)], (std::array{"1", "2", "-"}[static_cast<std::size_t>(rank % 3)]));
}

TEST(StoreServer, UnauthenticatedConnectionsUseBoundedMemory) {
  StoreServer server(kAnyPort, kTestJob);
  const auto client = connect_store(server.address(), kTestJob, 0, within_10s());
  const auto scan = [&](int count) {
    for (int i = 0; i < count; ++i)
      is_closed_by_server(connect_and_send(server, "GET / HTTP/1.1\r\n" + std::string(200, 'x')), within_10s());
  };
  scan(200);
  const std::size_t before = resident_bytes();
  scan(2000);
  EXPECT_LT(resident_bytes(), before + (1 << 20) + tests::kSanitizerQuarantineBytes);
  client->set("k", "v", within_10s());
}

TEST(StoreServer, SuspendedServerAcceptsATimelyHello) {
  // The hello arrives in the socket before the deadline, so it counts even if the server reads it later.
  StoreServer server(kAnyPort, kTestJob);
  const Fd fd = connect_and_send(server, "LOCKSTEP");
  std::this_thread::sleep_for(1500ms);
  base::net::send_all(fd.get(), hello("job").substr(8), within_10s());
  EXPECT_EQ(handshake_result_in(read_bytes(fd, store_protocol::kChallengeBytes)),
            store_protocol::HandshakeResult::kAccepted);
}

TEST(StoreClient, ReportsALostServerAtOnce) {
  auto server = std::make_unique<StoreServer>(kAnyPort, kTestJob);
  const auto client = connect_store(server->address(), kTestJob, 0, within_10s());
  Cause waiting_ended = Cause::kInternal;
  std::thread waiter([&] { waiting_ended = cause_of([&] { client->get("never", Deadline::in(60s)); }); });
  while (!client->find("ready", within_10s()) && client->add("n", 1, within_10s()) < 3)
    std::this_thread::sleep_for(5ms);
  const auto begin = Deadline::Clock::now();
  server.reset();
  waiter.join();
  EXPECT_EQ(waiting_ended, Cause::kCoordinatorLost);
  EXPECT_EQ(cause_of([&] { client->set("k", "v", within_10s()); }), Cause::kCoordinatorLost);
  EXPECT_LT(Deadline::Clock::now() - begin, 8s);
}

TEST(StoreClient, RefusesAReplacedServer) {
  auto server = std::make_unique<StoreServer>(kAnyPort, kTestJob);
  const base::net::Address address = server->address();
  const auto client = connect_store(address, kTestJob, 1, within_10s());
  client->set("k", "v", within_10s());
  server.reset();
  StoreServer next(address, kTestJob);  // a server of the same job
  const auto error = tests::thrown<CommError>([&] { client->set("k", "old", within_10s()); });
  EXPECT_EQ(error.cause(), Cause::kCoordinatorLost);
  EXPECT_THAT(error.what(), HasSubstr("another store has replaced it"));
  EXPECT_EQ(cause_of([&] { client->set("k", "old", within_10s()); }), Cause::kCoordinatorLost);
  EXPECT_EQ(next.store().find("k", within_10s()), std::nullopt);
  EXPECT_TRUE(connect_store(address, kTestJob, 1, within_10s()));
}

TEST(StoreClient, RetriesAConnectionClosedDuringTheHandshake) {
  StoreServer server(kAnyPort, kTestJob);
  const Fd listener = base::net::listen_on(kAnyPort);
  int refused = 0;
  std::thread closing_server([&] {
    for (; refused < 2; ++refused) {
      base::net::wait_readable(listener.get(), within_10s());
      const Fd one = base::net::try_accept(listener.get());
      read_bytes(one, hello("job").size());
    }
  });
  // A server that always closes the connection is reported in the end.
  EXPECT_EQ(cause_of([&] { connect_store(base::net::local_address(listener.get()), kTestJob, 0, Deadline::in(1s)); }),
            Cause::kCoordinatorLost);
  closing_server.join();
  EXPECT_EQ(refused, 2);
}

TEST(StoreClient, ReportsAnAddressWithoutServer) {
  const Fd reserved = base::net::reserve_port(kAnyPort);
  EXPECT_EQ(
      cause_of([&] { connect_store(base::net::local_address(reserved.get()), kTestJob, 0, Deadline::in(100ms)); }),
      Cause::kCoordinatorLost);
}

}  // namespace
}  // namespace lockstep::job
