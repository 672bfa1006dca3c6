#include "lockstep/comm/tcp/tcp.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/local_store.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm::tcp {
namespace {

using namespace std::chrono_literals;
using base::Deadline;
using testing::HasSubstr;
using Transports = std::vector<std::shared_ptr<Transport>>;

const job::JobKey& key() {
  static const job::JobKey one = job::JobKey::random();
  return one;
}

TcpOptions options_of(const std::shared_ptr<job::Store>& store, int rank, int size) {
  TcpOptions options{.store = store, .key = key(), .rank = rank, .address = "127.0.0.1", .timeout = 20s};
  for (int member = 0; member < size; ++member) options.members.push_back(10 * member);
  return options;
}

/// Calls `run` for each rank, each on a thread of its own.
void on_ranks(int size, const std::function<void(int)>& run) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        run(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
}

Transports connect(int size, bool has_thread) {
  Transports transports(static_cast<std::size_t>(size));
  const auto store = std::make_shared<job::LocalStore>();
  on_ranks(size, [&](int rank) {
    TcpOptions options = options_of(store, rank, size);
    options.has_thread = has_thread;
    transports[static_cast<std::size_t>(rank)] = make_tcp_transport(options);
  });
  return transports;
}

/// What `operation` ended with; "" for success.
std::string error_of(Pending& operation) {
  if (!operation.wait_until(Deadline::in(20s))) return "it did not end";
  if (!operation.error()) return "";
  try {
    std::rethrow_exception(operation.error());
  } catch (const std::exception& error) {
    return error.what();
  }
}

void run(Transport& transport, const Collective& op) { ASSERT_EQ(error_of(*transport.start(op)), ""); }

/// The values of a rank: small integers, which every dtype adds exactly.
at::Tensor values_of(int rank, std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return at::arange(count).add(rank).remainder(5).to(dtype);
}

at::Tensor sum_of_all(int size, std::int64_t count, at::ScalarType dtype) {
  at::Tensor sum = at::zeros({count}, at::kLong);
  for (int rank = 0; rank < size; ++rank) sum += values_of(rank, count, at::kLong);
  return sum.to(dtype);
}

void check_all_kinds(Transport& transport, int rank, int size, std::int64_t count, at::ScalarType dtype) {
  const at::Tensor mine = values_of(rank, count, dtype);
  const at::Tensor sum = sum_of_all(size, count, dtype);
  const int root = size - 1;
  std::vector<at::Tensor> all;
  for (int each = 0; each < size; ++each) all.push_back(values_of(each, count, dtype));
  const at::Tensor everything = at::cat(all);
  const at::Tensor undefined, none = at::empty({count * size}, dtype);

  at::Tensor tensor = mine.clone();
  run(transport, {.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor});
  EXPECT_TRUE(tensor.equal(sum)) << "all_reduce";
  tensor = mine.clone();
  run(transport, {.kind = CollectiveKind::kReduce, .input = tensor, .output = tensor, .root = root});
  EXPECT_TRUE(rank != root || tensor.equal(sum)) << "reduce";
  tensor = mine.clone();
  run(transport, {.kind = CollectiveKind::kBroadcast, .input = tensor, .output = tensor, .root = root});
  EXPECT_TRUE(tensor.equal(all.back())) << "broadcast";
  tensor = none.clone();
  run(transport, {.kind = CollectiveKind::kAllGather, .input = mine, .output = tensor});
  EXPECT_TRUE(tensor.equal(everything)) << "all_gather";
  tensor = mine.clone();
  run(transport,
      {.kind = CollectiveKind::kReduceScatter, .input = values_of(rank, count * size, dtype), .output = tensor});
  EXPECT_TRUE(tensor.equal(sum_of_all(size, count * size, dtype).narrow(0, count * rank, count))) << "reduce_scatter";
  tensor = none.clone();
  run(transport,
      {.kind = CollectiveKind::kGather, .input = mine, .output = rank == root ? tensor : undefined, .root = root});
  EXPECT_TRUE(rank != root || tensor.equal(everything)) << "gather";
  tensor = mine.clone();
  run(transport, {.kind = CollectiveKind::kScatter,
                  .input = rank == root ? everything : undefined,
                  .output = tensor,
                  .root = root});
  EXPECT_TRUE(tensor.equal(mine)) << "scatter";
  tensor = none.clone();
  run(transport, {.kind = CollectiveKind::kAllToAll, .input = mine.repeat({size}), .output = tensor});
  EXPECT_TRUE(tensor.equal(everything)) << "all_to_all";
  run(transport, {.kind = CollectiveKind::kBarrier});
}

/// Whether the transport has a thread of its own.
class Tcp : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(WithAndWithoutThread, Tcp, testing::Bool());

// The counts are below and above the sizes from which an operation is split, and no multiples of anything.
TEST_P(Tcp, AllKindsGiveTheSameOnEverySize) {
  for (const int size : {2, 3, 5}) {
    const Transports transports = connect(size, GetParam());
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kByte})
      for (const std::int64_t count : {0, 1, 7, 5001, 300007})
        on_ranks(size, [&](int rank) {
          SCOPED_TRACE(testing::Message() << size << " ranks, " << count << " of " << dtype << ", rank " << rank);
          check_all_kinds(*transports[static_cast<std::size_t>(rank)], rank, size, count, dtype);
        });
  }
}

TEST_P(Tcp, MeanAndOrderOfAdditionsAreEqualOnAllRanks) {
  constexpr int kSize = 3;
  const Transports transports = connect(kSize, GetParam());
  for (const std::int64_t count : {100, 100003}) {
    std::vector<at::Tensor> inputs, results(kSize);
    for (int rank = 0; rank < kSize; ++rank) inputs.push_back(at::randn({count}).mul(std::pow(1e3, rank)));
    on_ranks(kSize, [&](int rank) {
      at::Tensor& result = results[static_cast<std::size_t>(rank)] = inputs[static_cast<std::size_t>(rank)].clone();
      run(*transports[static_cast<std::size_t>(rank)],
          {.kind = CollectiveKind::kAllReduce, .input = result, .output = result, .op = ReduceOp::kMean});
    });
    EXPECT_TRUE(results[0].equal((inputs[0] + inputs[1] + inputs[2]) / 3));
    EXPECT_TRUE(results[0].equal(results[1]) && results[0].equal(results[2]));
  }
}

// Rank 1 starts everything later, and in between sends what rank 0 waits for.
TEST_P(Tcp, OperationsInFlightAndMessagesDoNotWaitForEachOther) {
  constexpr std::int64_t kCount = 200003;
  constexpr int kRounds = 12;
  const Transports transports = connect(2, GetParam());
  on_ranks(2, [&](int rank) {
    Transport& transport = *transports[static_cast<std::size_t>(rank)];
    std::vector<at::Tensor> tensors;
    std::vector<PendingPtr> pending;
    at::Tensor message = rank == 1 ? values_of(1, kCount) : at::zeros({kCount});
    const auto exchange = [&] {
      run(transport, {.kind = rank == 1 ? CollectiveKind::kSend : CollectiveKind::kRecv,
                      .input = rank == 1 ? message : at::Tensor(),
                      .output = rank == 1 ? at::Tensor() : message,
                      .root = 1 - rank,
                      .seq = 2});
    };
    std::thread sending([&] {
      if (rank == 1) exchange();  // done when rank 0 has received it
    });
    for (int round = 0; round < kRounds; ++round) {
      tensors.push_back(values_of(rank + round, kCount));
      const bool reduces = round % 2 == 0;
      pending.push_back(transport.start({.kind = reduces ? CollectiveKind::kAllReduce : CollectiveKind::kBroadcast,
                                         .input = tensors.back(),
                                         .output = tensors.back(),
                                         .root = round / 2 % 2}));
    }
    if (rank == 0) exchange();
    sending.join();
    EXPECT_TRUE(message.equal(values_of(1, kCount)));
    for (int round = 0; round < kRounds; ++round) {
      const auto index = static_cast<std::size_t>(round);
      ASSERT_EQ(error_of(*pending[index]), "");
      const at::Tensor expected = round % 2 == 0 ? values_of(round, kCount) + values_of(1 + round, kCount)
                                                 : values_of(round / 2 % 2 + round, kCount);
      EXPECT_TRUE(tensors[index].equal(expected)) << round;
    }
  });
}

TEST_P(Tcp, RankThatLeavesIsNamedAndMessagesOfOthersGoOn) {
  Transports transports = connect(3, GetParam());
  at::Tensor tensor = at::ones({1000}), message = at::zeros({5});
  const PendingPtr reduced =
      transports[0]->start({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor});
  const PendingPtr lost = transports[0]->start({.kind = CollectiveKind::kRecv, .output = message, .root = 1, .seq = 2});
  transports[1].reset();
  EXPECT_THAT(error_of(*reduced), HasSubstr("the connection to rank 10 at 127.0.0.1:"));
  EXPECT_THAT(error_of(*lost), HasSubstr("the connection to rank 10 at 127.0.0.1:"));
  EXPECT_THAT(error_of(*transports[0]->start({.kind = CollectiveKind::kBarrier})), HasSubstr("rank 10"));
  EXPECT_THAT(error_of(*transports[0]->start({.kind = CollectiveKind::kSend, .input = message, .root = 1, .seq = 2})),
              HasSubstr("rank 10"));
  const PendingPtr sent =
      transports[2]->start({.kind = CollectiveKind::kSend, .input = at::ones({5}), .root = 0, .seq = 2});
  run(*transports[0], {.kind = CollectiveKind::kRecv, .output = message, .root = 2, .seq = 2});
  EXPECT_EQ(error_of(*sent), "");
  EXPECT_TRUE(message.equal(at::ones({5})));
}

TEST_P(Tcp, AbortEndsWhatRunsAndWhatComes) {
  const Transports transports = connect(2, GetParam());
  at::Tensor tensor = at::ones({1 << 22}), message = at::ones({1 << 22});
  const PendingPtr reduced =
      transports[0]->start({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor});
  const PendingPtr sent = transports[0]->start({.kind = CollectiveKind::kSend, .input = message, .root = 1, .seq = 2});
  transports[0]->abort(std::make_exception_ptr(std::runtime_error("enough")));
  EXPECT_EQ(error_of(*reduced), "enough");
  EXPECT_EQ(error_of(*sent), "enough");
  EXPECT_EQ(error_of(*transports[0]->start({.kind = CollectiveKind::kBarrier})), "enough");
}

TEST_P(Tcp, DifferentCallsEndWithAnError) {
  const Transports transports = connect(2, GetParam());
  at::Tensor tensor = at::ones({10});
  const PendingPtr one = transports[0]->start({.kind = CollectiveKind::kBroadcast, .input = tensor, .output = tensor});
  const PendingPtr other = transports[1]->start({.kind = CollectiveKind::kBarrier});
  EXPECT_THAT(error_of(*other), HasSubstr("received operation 1 with 40 bytes; expected operation 1 with 0"));
}

// Nobody moves the bytes of rank 0 but the threads that wait for its operations, one after the other.
TEST(TcpWithoutThread, ThreadsThatWaitTakeTurns) {
  const Transports transports = connect(2, false);
  std::vector<PendingPtr> pending;
  for (int i = 0; i < 8; ++i) pending.push_back(transports[0]->start({.kind = CollectiveKind::kBarrier}));
  std::vector<std::thread> waiting;
  for (const PendingPtr& each : pending) waiting.emplace_back([&each] { EXPECT_EQ(error_of(*each), ""); });
  for (std::thread& each : waiting) {
    run(*transports[1], {.kind = CollectiveKind::kBarrier});
    each.join();  // when the thread that sends and receives has ended, another one continues
  }
  EXPECT_FALSE(transports[0]->start({.kind = CollectiveKind::kBarrier})->wait_until(Deadline::in(5ms)));
}

TEST(TcpWithoutThread, DoneReceivesWhatHasArrived) {
  const Transports transports = connect(2, false);
  const PendingPtr barrier = transports[0]->start({.kind = CollectiveKind::kBarrier});
  EXPECT_FALSE(barrier->done());
  run(*transports[1], {.kind = CollectiveKind::kBarrier});
  std::this_thread::sleep_for(100ms);  // on loopback, its message arrives as soon as it is sent
  EXPECT_TRUE(barrier->done());
}

TEST_P(Tcp, AbortEndsAThreadThatSleeps) {
  const Transports transports = connect(2, GetParam());
  const PendingPtr barrier = transports[0]->start({.kind = CollectiveKind::kBarrier});
  std::thread waiting([&] { EXPECT_EQ(error_of(*barrier), "enough"); });
  // Meanwhile one of the two sleeps in poll(): the other one takes over when the first wait has ended.
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(barrier->wait_until(Deadline::in(30ms)));
  const Deadline soon = Deadline::in(10s);
  transports[0]->abort(std::make_exception_ptr(std::runtime_error("enough")));
  waiting.join();
  EXPECT_FALSE(soon.expired());
}

// --- connect_mesh() ---

/// Connects to whoever listens, does `act`, and returns what it has answered until it closed the connection.
std::string answer_to(const base::net::Address& address, std::string_view sent) {
  const base::Fd fd = base::net::connect_to(address, Deadline::in(5s));
  base::net::send_all(fd.get(), sent, Deadline::in(5s));
  std::string answer;
  try {
    for (char byte; base::net::recv_all(fd.get(), &byte, 1, Deadline::in(5s));) answer += byte;
  } catch (const base::SystemError& error) {
    if (error.cause() == base::Cause::kRankStuck) answer = "not closed";
  }
  return answer;
}

base::net::Address address_in(job::Store& store, int rank) {
  const auto value = store.get(std::to_string(rank), Deadline::in(5s));
  return base::net::parse_address("address", value.value_or("").substr(32));
}

std::string hello_of(std::uint32_t rank, char connection) {
  std::string hello = "LOCKMESH";
  hello.append(reinterpret_cast<const char*>(&rank), 4);
  return hello + connection + std::string(32, 'n');
}

TEST(TcpMesh, OthersAreRefusedAndGetNothing) {
  const auto store = std::make_shared<job::LocalStore>();
  std::vector<std::vector<PeerSockets>> sockets(3);
  std::thread others([&] {
    const base::net::Address address = address_in(*store, 0);
    EXPECT_EQ(answer_to(address, std::string(8, '\0')), "");  // as Gloo's first pair; closed after 2 s
    EXPECT_EQ(answer_to(address, "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n" + std::string(20, ' ')), "");
    EXPECT_EQ(answer_to(address, hello_of(0, 0)), "") << "a rank that does not connect to this one";
    EXPECT_EQ(answer_to(address, hello_of(3, 0)), "");
    EXPECT_EQ(answer_to(address, hello_of(1, kNumPurposes)), "");
    // What follows the hello of a rank is a nonce and a proof, and then it is closed.
    EXPECT_EQ(answer_to(address, hello_of(1, 0) + std::string(32, 'p')).size(), 64u);
    std::vector<base::Fd> silent;
    for (int i = 0; i < 200; ++i) silent.push_back(base::net::connect_to(address, Deadline::in(5s)));
    for (std::size_t i = 0; i < 100; ++i) {  // no more than 64 are kept, and the oldest are closed first
      char byte;
      EXPECT_FALSE(base::net::recv_all(silent[i].get(), &byte, 1, Deadline::in(1s))) << i;
    }
    std::thread late([&] { sockets[2] = connect_mesh(options_of(store, 2, 3)); });
    sockets[1] = connect_mesh(options_of(store, 1, 3));
    late.join();
  });
  sockets[0] = connect_mesh(options_of(store, 0, 3));
  others.join();
  for (std::size_t from = 0; from < 3; ++from)
    for (std::size_t to = 0; to < 3; ++to)
      for (std::size_t use = 0; use < kNumPurposes; ++use) {
        if (from == to) continue;
        const std::string sent = std::to_string(100 * use + 10 * from + to);
        base::net::send_all(sockets[from][to][use].get(), sent, Deadline::in(5s));
        std::string received(sent.size(), ' ');
        ASSERT_TRUE(base::net::recv_all(sockets[to][from][use].get(), received.data(), sent.size(), Deadline::in(5s)));
        EXPECT_EQ(received, sent);
      }
}

// More connections to the first rank than those of strangers that are kept.
TEST(TcpMesh, ManyRanks) {
  constexpr int kSize = 30;
  const auto store = std::make_shared<job::LocalStore>();
  std::vector<std::vector<PeerSockets>> sockets(kSize);
  on_ranks(kSize,
           [&](int rank) { sockets[static_cast<std::size_t>(rank)] = connect_mesh(options_of(store, rank, kSize)); });
  for (std::size_t rank = 1; rank < kSize; ++rank) EXPECT_TRUE(sockets[rank][0][kMessagesDown]) << rank;
}

TEST(TcpMesh, NothingListensAfterwards) {
  const auto store = std::make_shared<job::LocalStore>();
  std::vector<std::vector<PeerSockets>> sockets(2);
  on_ranks(2, [&](int rank) { sockets[static_cast<std::size_t>(rank)] = connect_mesh(options_of(store, rank, 2)); });
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_THROW(base::net::connect_to(address_in(*store, rank), Deadline::in(1s), true), base::PeerLostError);
}

// A relay between rank 1 and rank 0 listens to their handshakes, and loses one.
TEST(TcpMesh, ReplayAndAnotherKeyAreRefused) {
  const auto store = std::make_shared<job::LocalStore>();
  const base::Fd relay = base::net::listen_on({"127.0.0.1", 0});
  const auto real = std::make_shared<job::LocalStore>();
  std::vector<PeerSockets> first, second;
  std::thread rank0([&] { first = connect_mesh(options_of(real, 0, 2)); });
  const std::string value = real->get("0", Deadline::in(5s)).value_or("");
  store->set("0", value.substr(0, 32) + to_string(base::net::local_address(relay.get())), Deadline::in(5s));
  std::thread rank1([&] { second = connect_mesh(options_of(store, 1, 2)); });
  std::string hello(45, ' '), challenge(64, ' '), proof(32, ' ');
  std::vector<base::Fd> kept;
  for (int connection = 0; connection <= kNumPurposes; ++connection) {
    ASSERT_TRUE(base::net::wait_readable(relay.get(), Deadline::in(5s)));
    base::Fd from = base::net::try_accept(relay.get());
    base::Fd to = base::net::connect_to(address_in(*real, 0), Deadline::in(5s));
    ASSERT_TRUE(base::net::recv_all(from.get(), hello.data(), hello.size(), Deadline::in(5s)));
    if (connection == 1) {  // replayed: the proof belongs to another nonce
      EXPECT_EQ(answer_to(address_in(*real, 0), hello + proof).size(), 64u);
    }
    base::net::send_all(to.get(), hello, Deadline::in(5s));
    ASSERT_TRUE(base::net::recv_all(to.get(), challenge.data(), challenge.size(), Deadline::in(5s)));
    base::net::send_all(from.get(), challenge, Deadline::in(5s));
    ASSERT_TRUE(base::net::recv_all(from.get(), proof.data(), proof.size(), Deadline::in(5s)));
    if (connection == 0) continue;  // lost with its proof: rank 1 connects again
    base::net::send_all(to.get(), proof, Deadline::in(5s));
    char admission;
    ASSERT_TRUE(base::net::recv_all(to.get(), &admission, 1, Deadline::in(5s)));
    base::net::send_all(from.get(), {&admission, 1}, Deadline::in(5s));
    kept.push_back(std::move(from));
    kept.push_back(std::move(to));
  }
  rank0.join();
  rank1.join();

  const auto third = std::make_shared<job::LocalStore>();
  std::jthread honest([&] {
    TcpOptions options = options_of(third, 0, 2);
    options.timeout = 2s;
    EXPECT_THROW(connect_mesh(options), base::CommError);
  });
  TcpOptions options = options_of(third, 1, 2);
  options.key = job::JobKey::random();
  options.timeout = 1s;
  const auto error = tests::thrown<base::CommError>([&] { connect_mesh(options); });
  EXPECT_THAT(error.what(), HasSubstr("no connection to rank 0 in time, which listens at 127.0.0.1:"));
  EXPECT_THAT(error.what(), HasSubstr("does not have the key of this job"));
  honest.join();
}

TEST(TcpMesh, MissingRankIsNamed) {
  const auto store = std::make_shared<job::LocalStore>();
  TcpOptions options = options_of(store, 1, 3);
  options.timeout = 300ms;
  const auto error = tests::thrown<base::CommError>([&] { connect_mesh(options); });
  EXPECT_THAT(error.what(), HasSubstr("no connection to rank 0 in time"));
  EXPECT_EQ(error.peer(), 0);
  EXPECT_EQ(error.rank(), 10);
}

}  // namespace
}  // namespace lockstep::comm::tcp
