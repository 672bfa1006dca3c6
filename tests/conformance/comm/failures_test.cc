// Tests the errors of ranks whose calls differ, and how soon they are thrown. Each case is a job of its own, because
// its error is the first cause of the job.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lockstep/comm/group_access.h"
#include "lockstep/comm/init.h"
#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::failures_test {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::CommError;
using base::Deadline;
using base::DesyncError;
using base::PeerLostError;
using base::TimeoutError;
using comm::Group;
using comm::ReduceOp;
using comm::Work;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// Ranks that compare their calls report a difference at once. Deadlock detection polls after 0.2, 0.45 and 0.76 s. The
// limits are higher, because the machine may be busy.
constexpr auto kComparisonLimit = 2s;
constexpr auto kPollingLimit = 5s;

/// Runs `call`, which must throw an E within `limit`, and returns it.
template <typename E, typename Call>
E thrown_within(Deadline::Clock::duration limit, Call call) {
  const auto begin = Deadline::Clock::now();
  try {
    call();
  } catch (const E& error) {
    const auto took = Deadline::Clock::now() - begin;
    EXPECT_LT(took, limit);
    if (world().rank() == 0)
      std::printf("thrown after %.2f s: %s\n", std::chrono::duration<double>(took).count(), error.what());
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "a different error: " << error.what();
  }
  ADD_FAILURE() << "the expected error was not thrown";
  throw std::runtime_error("the test cannot continue");
}

/// Runs `call` on each rank and expects the error that rank 0 called `first` and another rank called `second`. Expects
/// that `group`, on which this rank made its call, is closed afterwards.
template <typename Call>
void expect_desync(const std::string& first, const std::string& second, Call call,
                   Deadline::Clock::duration limit = kComparisonLimit, Group group = world()) {
  const auto error = thrown_within<DesyncError>(limit, call);
  EXPECT_EQ(error.cause(), Cause::kDesync);
  const auto names_both = AllOf(HasSubstr("rank 0 called " + first + ", rank "), HasSubstr(" called " + second));
  EXPECT_THAT(error.what(), names_both);
  EXPECT_THAT(error.hint(), HasSubstr("the same"));
  const std::string again = message_of<DesyncError>([&] { group.barrier(); });
  EXPECT_THAT(again, names_both);
}

at::Tensor make_tensor() { return at::zeros({4}); }
bool on_rank(int rank) { return world().rank() == rank; }
bool is_last_rank() { return on_rank(world().size() - 1); }

TEST(Failures, DifferentOperations) {
  expect_desync("all_reduce(float32[4])", "broadcast(float32[4], root 0)",
                [] { on_rank(0) ? world().all_reduce(make_tensor()) : world().broadcast(make_tensor(), 0); });
}

TEST(Failures, LateCallOnAnotherGroup) {
  Group again = world().split(0);
  if (on_rank(0)) std::this_thread::sleep_for(4s);  // after this time the other ranks poll less often
  const auto entered = Deadline::Clock::now();
  const std::string text = message_of<DesyncError>([&] { on_rank(0) ? again.barrier() : world().barrier(); });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 0 called barrier()"), HasSubstr("rank ")));
  if (on_rank(0)) {
    EXPECT_LT(Deadline::Clock::now() - entered, kComparisonLimit);
  }
}

TEST(Failures, ClosedGroupThrowsTheSameError) {
  const auto first = thrown_within<DesyncError>(
      kComparisonLimit, [] { on_rank(0) ? world().all_reduce(make_tensor()) : world().barrier(); });
  const auto second = thrown_within<DesyncError>(100ms, [] { world().barrier(); });
  EXPECT_STREQ(second.what(), first.what());
  const auto third = thrown_within<DesyncError>(
      100ms, [] { world().send_async(make_tensor(), (world().rank() + 1) % world().size()).wait(); });
  EXPECT_STREQ(third.what(), first.what());
}

TEST(Failures, DifferentDtypes) {
  expect_desync("all_reduce(float32[4])", "all_reduce(float64[4])",
                [] { world().all_reduce(on_rank(0) ? make_tensor() : make_tensor().to(at::kDouble)); });
}

TEST(Failures, DifferentShapes) {
  expect_desync("all_reduce(float32[4])", "all_reduce(float32[2,2])",
                [] { world().all_reduce(on_rank(0) ? make_tensor() : make_tensor().view({2, 2})); });
}

TEST(Failures, DifferentShapesOfLargeTensors) {
  // With large tensors, ranks compare their calls only after they have published the data, and still must not change
  // the tensors.
  const at::Tensor large = at::full({300000}, 1.0 + world().rank());
  expect_desync("all_reduce(float32[300000])", "all_reduce(float32[1000,300])",
                [&] { world().all_reduce(on_rank(0) ? large : large.view({1000, 300})); });
  EXPECT_TRUE(large.eq(1.0 + world().rank()).all().item<bool>());
}

TEST(Failures, CallComparedDuringOperationAgainstCallComparedBefore) {
  expect_desync("all_reduce(float32[4])", "all_gather(uint8[3])", [] {
    if (on_rank(0))
      world().all_reduce(make_tensor());
    else
      world().all_gather_bytes("abc");
  });
}

TEST(Failures, DifferentRoots) {
  expect_desync("broadcast(float32[4], root 0)", "broadcast(float32[4], root 1)",
                [] { world().broadcast(make_tensor(), on_rank(0) ? 0 : 1); });
}

TEST(Failures, DifferentReduceOps) {
  expect_desync("all_reduce(float32[4], max)", "all_reduce(float32[4])",
                [] { world().all_reduce(make_tensor(), on_rank(0) ? ReduceOp::kMax : ReduceOp::kSum); });
}

TEST(Failures, DifferentNames) {
  expect_desync("all_reduce(left: float32[4])", "all_reduce(right: float32[4])",
                [] { world().all_reduce(make_tensor(), ReduceOp::kSum, {.name = on_rank(0) ? "left" : "right"}); });
}

TEST(Failures, DifferentRootsOfByteStrings) {
  expect_desync("broadcast(uint8[3], root 0)", "broadcast(uint8[3], root 1)",
                [] { world().broadcast_bytes("abc", on_rank(0) ? 0 : 1); });
}

TEST(Failures, DifferentAsyncOperations) {
  expect_desync("all_reduce(float32[4])", "barrier()", [] {
    Work work = on_rank(0) ? world().all_reduce_async(make_tensor()) : world().barrier_async();
    work.wait();
  });
}

TEST(Failures, OperationsQueuedBehindFailureFailAlike) {
  const auto start = [](int i) {
    return on_rank(0) && i == 2 ? world().barrier_async() : world().all_reduce_async(make_tensor());
  };
  std::vector<Work> works;
  for (int i = 0; i < 3; ++i) works.push_back(start(i));
  try {
    while (works.size() < 5) works.push_back(start(3));
  } catch (const DesyncError& error) {  // the failure may have closed the group
    EXPECT_THAT(error.what(), HasSubstr("rank 0 called barrier(), rank 1 called all_reduce(float32[4])"));
  }
  works[1].wait();
  for (std::size_t i = 2; i < works.size(); ++i) {
    const auto error = thrown_within<DesyncError>(kComparisonLimit, [&] { works[i].wait(); });
    EXPECT_THAT(error.what(), HasSubstr("rank 0 called barrier(), rank 1 called all_reduce(float32[4])"));
    EXPECT_NE(works[i].error(), nullptr);
  }
}

TEST(Failures, DifferingRankIsNamed) {
  // With three ranks, the last one differs from the majority. With two ranks, rank 1 is reported.
  const auto error = thrown_within<DesyncError>(
      kComparisonLimit, [] { is_last_rank() ? world().barrier() : world().all_reduce(make_tensor()); });
  EXPECT_EQ(error.peer(), world().size() - 1);
  EXPECT_EQ(error.rank(), world().rank());
  EXPECT_THAT(error.op(), HasSubstr("#1"));
}

TEST(Failures, RankLeavesWorld) {
  if (is_last_rank()) return leave_world();
  const auto error = thrown_within<CommError>(kPollingLimit, [] { world().all_reduce(make_tensor()); });
  EXPECT_EQ(error.cause(), Cause::kUnevenInput);
  EXPECT_EQ(error.peer(), world().size() - 1);
  EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(world().size() - 1) + " finished while rank"));
  EXPECT_THAT(error.hint(), HasSubstr("same number of batches"));
}

TEST(Failures, RankExitsWithoutLeaving) {
  if (is_last_rank()) ::_exit(0);
  const auto error = thrown_within<CommError>(kPollingLimit, [] { world().all_reduce(make_tensor()); });
  EXPECT_EQ(error.cause(), Cause::kUnevenInput);
  EXPECT_EQ(error.peer(), world().size() - 1);
  EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(world().size() - 1) + " ended while rank"));
}

TEST(Failures, BarrierAgainstAnotherGroup) {
  Group part = world().split(0);
  expect_desync(
      "barrier()", "all_reduce(float32[4])", [&] { on_rank(0) ? world().barrier() : part.all_reduce(make_tensor()); },
      kPollingLimit, on_rank(0) ? world() : part);
}

TEST(Failures, BarrierAgainstAReceive) {
  expect_desync(
      "barrier()", "recv(float32[4]) from rank 0",
      [] { on_rank(1) ? world().recv(make_tensor(), 0) : world().barrier(); }, kPollingLimit);
}

TEST(Failures, AsyncOperationsOfDifferentGroups) {
  Group part = world().split(0);
  expect_desync(
      "barrier()", "all_reduce(float32[4])",
      [&] { on_rank(0) ? world().barrier_async().wait() : part.all_reduce_async(make_tensor()).wait(); }, kPollingLimit,
      on_rank(0) ? world() : part);
}

TEST(Failures, MutualSendBeforeReceive) {
  if (world().rank() > 1) return;
  const auto error = thrown_within<DesyncError>(kPollingLimit, [] { world().send(make_tensor(), 1 - world().rank()); });
  EXPECT_THAT(error.what(),
              HasSubstr("rank 0 called send(float32[4]) to rank 1, rank 1 called send(float32[4]) to rank 0"));
}

TEST(Failures, SenderAndReceiverDiffer) {
  if (world().rank() > 1) return;
  const auto error = thrown_within<DesyncError>(kPollingLimit, [] {
    on_rank(0) ? world().send(make_tensor(), 1) : world().recv(at::zeros({5}, at::kDouble), 0);
  });
  EXPECT_THAT(error.what(), HasSubstr("rank 0 called send(float32[4]), rank 1 called recv(float64[5])"));
}

TEST(Failures, SenderAndReceiverFromAnyRankDiffer) {
  if (world().rank() > 1) return;
  const auto error = thrown_within<DesyncError>(kPollingLimit, [] {
    if (on_rank(0)) return world().send(make_tensor(), 1);
    world().recv_any(at::zeros({5}, at::kDouble));
  });
  EXPECT_THAT(error.what(), HasSubstr("rank 0 called send(float32[4]), rank 1 called recv(float64[5])"));
}

TEST(Failures, AllSendersLeave) {
  if (!on_rank(0)) return;
  const auto error = thrown_within<CommError>(kPollingLimit, [] { world().recv_any(make_tensor()); });
  EXPECT_EQ(error.cause(), Cause::kUnevenInput);
  // With a transport that has connections, the last one that ends is named.
  EXPECT_THAT(error.what(), ContainsRegex("(all other ranks|rank [0-9]) finished while rank 0 waits for (it|one of "
                                          "them) in recv\\(float32\\[4\\]\\) from"));
}

TEST(Failures, SenderMayLeaveBeforeAnotherSends) {
  if (world().size() < 3 || on_rank(1)) return;
  if (on_rank(2)) {
    std::this_thread::sleep_for(1s);  // rank 1 has left
    return world().send(make_tensor(), 0);
  }
  if (on_rank(0)) {
    EXPECT_EQ(world().recv_any(make_tensor()), 2);
  }
}

/// Expects that the other ranks time out after `timeout` because the last rank makes no call.
void expect_timeout(std::chrono::milliseconds timeout) {
  std::optional<TempDir> own;
  if (is_last_rank()) own.emplace();
  const std::string folder = world().broadcast_bytes(own ? own->path() : "", world().size() - 1);
  const auto done = [&](int rank) { return folder + "/" + std::to_string(rank); };
  const std::string absent = std::to_string(world().size() - 1);
  if (is_last_rank()) {
    for (int r = 0; r + 1 < world().size(); ++r)
      for (const Deadline limit = Deadline::in(20s); !std::filesystem::exists(done(r)) && !limit.expired();)
        std::this_thread::sleep_for(1ms);
    return;
  }
  const auto error = thrown_within<TimeoutError>(timeout + kComparisonLimit, [&] {
    world().all_reduce(make_tensor(), ReduceOp::kSum, {.name = "loss", .deadline = Deadline::in(timeout)});
  });
  EXPECT_EQ(error.cause(), Cause::kRankStuck);
  const std::string waiting = world().size() < 3 ? "" : "; other waiting ranks: ";
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("all_reduce(loss: float32[4])"), HasSubstr("absent ranks: " + absent + waiting)));
  std::ofstream(done(world().rank())).put('x');
}

TEST(Failures, LongDeadlineNamesMissingRanks) { expect_timeout(1500ms); }
TEST(Failures, ShortDeadlineNamesMissingRanks) { expect_timeout(50ms); }

TEST(Failures, ErrorPassedToGroupFailKeepsItsType) {
  // DDP reports a difference of replicas in this way.
  const auto error = thrown_within<DesyncError>(kPollingLimit, [] {
    if (on_rank(0))
      comm::GroupAccess::fail(
          world(), DesyncError(Cause::kDesync, "ddp", 0, 1, "parameters differ", "the same model everywhere"));
    world().all_reduce(make_tensor());
  });
  EXPECT_THAT(error.what(), HasSubstr("parameters differ"));
}

TEST(Failures, GroupMayBeDestroyedBeforeItsOperations) {
  Work work = [] {
    Group part = world().split(0);
    return is_last_rank() ? Work(part.barrier_async()) : world().barrier_async();
  }();
  if (is_last_rank()) {
    // The group was destroyed before the other ranks called.
    EXPECT_THROW(work.wait(), CommError);
    world().barrier();
  } else {
    work.wait();
  }
}

TEST(Failures, InitAfterLeavingIsRejected) {
  world().barrier();
  leave_world();
  EXPECT_THAT(message_of<base::UsageError>([] { comm::init(); }), HasSubstr("has left its world"));
}

// Started by killed_rank_test.cc, which checks the output of the launcher.
TEST(Killed, LastRankIsKilled) {
  world().barrier();
  ::signal(SIGTERM, SIG_IGN);  // after the death of a rank, the launcher sends SIGTERM to the others
  if (is_last_rank()) ::raise(SIGKILL);
  const auto error = thrown_within<PeerLostError>(kPollingLimit, [] {
    for (;;) world().all_reduce(at::zeros({1 << 18}));
  });
  EXPECT_EQ(error.peer(), world().size() - 1);
  EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(world().size() - 1) + " was killed by SIGKILL"));
  if (!::testing::Test::HasFailure()) std::printf("peer lost: %s\n", error.what());
  std::fflush(stdout);
}

}  // namespace
}  // namespace lockstep::tests::failures_test
