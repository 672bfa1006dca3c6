// Tests messages between two ranks, concurrent operations, split groups, and invalid calls.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/comm/init.h"
#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::groups_test {
namespace {

using namespace std::chrono_literals;
using base::Deadline;
using base::UsageError;
using comm::Group;
using comm::ReduceOp;
using comm::Work;
using ::testing::HasSubstr;

int next() { return (world().rank() + 1) % world().size(); }
int previous() { return (world().rank() + world().size() - 1) % world().size(); }
at::Tensor number(double value) { return at::full({1}, value, at::kDouble); }

/// A folder that all ranks share, for markers. The constructor and the destructor are collective.
class MarkerFolder {
 public:
  MarkerFolder() {
    if (world().rank() == 0) own_.emplace();
    path_ = world().broadcast_bytes(own_ ? own_->path() : "", 0);
  }
  ~MarkerFolder() { world().barrier(); }
  void mark(const std::string& name) const { std::ofstream(path_ + "/" + name).put('x'); }
  bool is_marked(const std::string& name) const { return std::filesystem::exists(path_ + "/" + name); }
  bool wait_for_mark(const std::string& name) const {
    for (const Deadline limit = Deadline::in(20s); !is_marked(name);) {
      if (limit.expired()) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }

 private:
  std::optional<TempDir> own_;
  std::string path_;
};

TEST(PointToPoint, RingInTurns) {
  if (world().size() < 2) return;
  for (const std::int64_t count : {0, 1, 1 << 20}) {
    const at::Tensor mine = at::full({count}, world().rank(), at::kInt);
    const at::Tensor theirs = at::full({count}, -1, at::kInt);
    if (world().rank() % 2 == 0) world().send(mine, next());
    world().recv(theirs, previous());
    if (world().rank() % 2 == 1) world().send(mine, next());
    EXPECT_TRUE(theirs.eq(previous()).all().item<bool>());
  }
}

TEST(PointToPoint, AllRanksToAllRanksConcurrently) {
  std::vector<at::Tensor> received;
  std::vector<Work> works;
  for (int r = 0; r < world().size(); ++r) {
    received.push_back(number(-1));
    if (r != world().rank()) works.push_back(world().recv_async(received.back(), r));
  }
  for (int r = 0; r < world().size(); ++r)
    if (r != world().rank()) works.push_back(world().send_async(number(100 * world().rank() + r), r));
  for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
  for (int r = 0; r < world().size(); ++r)
    if (r != world().rank()) {
      EXPECT_EQ(received[static_cast<std::size_t>(r)].item<double>(), 100 * r + world().rank());
    }
}

TEST(PointToPoint, MessagesToAPeerArriveInOrder) {
  if (world().size() < 2 || world().rank() > 1) return;
  constexpr int kCount = 20;
  std::vector<at::Tensor> received;
  std::vector<Work> works;
  for (int i = 0; i < kCount; ++i) {
    if (world().rank() == 0) {
      works.push_back(world().send_async(at::full({i}, i, at::kLong), 1));
    } else {
      received.push_back(at::full({i}, -1, at::kLong));
      works.push_back(world().recv_async(received.back(), 0));
    }
  }
  for (Work& work : works) work.wait();
  for (int i = 0; i < static_cast<int>(received.size()); ++i)
    EXPECT_TRUE(received[static_cast<std::size_t>(i)].eq(i).all().item<bool>());
}

TEST(PointToPoint, MessagesOfDifferentPeersAreIndependent) {
  if (world().size() < 3 || world().rank() > 2) return;
  // Rank 0 starts to receive from rank 1 first. Rank 1 sends only after rank 0 has received the message of rank 2.
  if (world().rank() == 0) {
    at::Tensor from_one = number(-1);
    at::Tensor from_two = number(-1);
    Work first = world().recv_async(from_one, 1);
    Work second = world().recv_async(from_two, 2);
    second.wait(Deadline::in(10s));
    first.wait(Deadline::in(10s));
    EXPECT_EQ(from_one.item<double>() + from_two.item<double>(), 30);
  } else if (world().rank() == 1) {
    world().recv(number(0), 2);
    world().send(number(10), 0);
  } else {
    world().send(number(20), 0);
    world().send(number(0), 1);
  }
}

TEST(PointToPoint, FromAnyRank) {
  // Every other rank sends three messages. They arrive in order, received from any rank or from that one.
  if (world().size() < 2) return;
  if (world().rank() != 0) {
    for (int i = 0; i < 3; ++i) world().send(number(10 * world().rank() + i), 0);
    return;
  }
  std::vector<int> received(static_cast<std::size_t>(world().size()));
  const auto expect_next = [&](int source, const at::Tensor& message) {
    int& from_source = received.at(static_cast<std::size_t>(source));
    EXPECT_LT(from_source, 3);
    EXPECT_EQ(message.item<double>(), 10 * source + from_source++);
  };
  const auto receive_any = [&](bool async) {
    const at::Tensor message = number(-1);
    const auto source = std::make_shared<int>(-1);
    if (async)
      world().recv_any_async(message, source).wait();
    else
      *source = world().recv_any(message);
    expect_next(*source, message);
  };
  for (int i = 0; i < world().size() - 1; ++i) receive_any(i % 2 == 0);
  for (int r = 1; r < world().size(); ++r) {
    const at::Tensor message = number(-1);
    if (received[static_cast<std::size_t>(r)] == 3) continue;
    world().recv(message, r);
    expect_next(r, message);
  }
  while (std::accumulate(received.begin(), received.end(), 0) < 3 * (world().size() - 1)) receive_any(false);
}

TEST(PointToPoint, WaitForAnyRankIsNotADeadlock) {
  if (world().size() < 3) return;
  // Rank 0 waits for any rank while rank 1 waits for it in the barrier; rank 2 sends later.
  const at::Tensor message = number(-1);
  if (world().rank() == 2) {
    std::this_thread::sleep_for(2500ms);  // meanwhile, deadlock detection on the other ranks polls several times
    world().send(number(2), 0);
  }
  if (world().rank() == 0) {
    EXPECT_EQ(world().recv_any(message), 2);
    EXPECT_EQ(message.item<double>(), 2);
  }
  world().barrier();
}

TEST(PointToPoint, NonContiguousViews) {
  if (world().size() < 2 || world().rank() > 1) return;
  const at::Tensor transposed_view = at::arange(6, at::kFloat).view({2, 3}).t();
  if (world().rank() == 0) return world().send(transposed_view, 1, {.name = "view"});
  const at::Tensor wide = at::zeros({3, 4});
  world().recv(wide.slice(1, 0, 4, 2), 0, {.name = "view"});
  EXPECT_TRUE(at::equal(wide.slice(1, 0, 4, 2), transposed_view));
  EXPECT_EQ(wide.slice(1, 1, 4, 2).abs().sum().item<float>(), 0);
}

TEST(InFlight, ManyOperationsOfManyKinds) {
  const int size = world().size();
  std::vector<at::Tensor> sums, gathered, copies;
  std::vector<Work> works;
  for (int i = 0; i < 10; ++i) {
    sums.push_back(number(world().rank() + i));
    works.push_back(world().all_reduce_async(sums.back()));
    gathered.push_back(at::zeros({size}, at::kDouble));
    works.push_back(world().all_gather_async(gathered.back(), number(world().rank() * i)));
    copies.push_back(number(world().rank()));
    works.push_back(world().broadcast_async(copies.back(), i % size));
    works.push_back(world().barrier_async());
  }
  const at::Tensor last = number(1);
  world().all_reduce(last);  // queued behind all of them
  EXPECT_EQ(last.item<double>(), size);
  for (auto work = works.rbegin(); work != works.rend(); ++work) {
    EXPECT_TRUE(work->done());
    EXPECT_EQ(work->error(), nullptr);
    work->wait();
  }
  for (int i = 0; i < 10; ++i) {
    const auto at_i = static_cast<std::size_t>(i);
    EXPECT_EQ(sums[at_i].item<double>(), size * (size - 1) / 2 + size * i);
    EXPECT_TRUE(at::equal(gathered[at_i], at::arange(size, at::kDouble) * i));
    EXPECT_EQ(copies[at_i].item<double>(), i % size);
  }
}

TEST(InFlight, TimedOutWaitDoesNotEndOperation) {
  if (world().size() < 2) return;
  const MarkerFolder folder;
  if (world().rank() == 0) {
    Work work = world().barrier_async();
    EXPECT_THROW(work.wait(Deadline::in(20ms)), base::TimeoutError);
    EXPECT_FALSE(work.done());
    EXPECT_EQ(work.error(), nullptr);
    folder.mark("tried");
    work.wait();
    EXPECT_TRUE(work.done());
  } else {
    ASSERT_TRUE(folder.wait_for_mark("tried"));
    world().barrier();
  }
}

TEST(InFlight, EarlyReceiveIsNotADeadlock) {
  if (world().size() < 2) return;
  // Rank 0 waits for rank 1 in recv, and rank 1 for rank 0 in the barrier. This is not a deadlock, because rank 0
  // enters the barrier later, and rank 1 then sends.
  const at::Tensor message = number(-1);
  std::optional<Work> early;
  if (world().rank() == 0) {
    early = world().recv_async(message, 1);
    std::this_thread::sleep_for(2500ms);  // meanwhile, deadlock detection on the other ranks polls several times
  }
  world().barrier();
  if (world().rank() == 1) world().send(number(5), 0);
  if (early) early->wait();
  if (early) {
    EXPECT_EQ(message.item<double>(), 5);
  }
}

TEST(Barrier, ReleasesOnlyWhenAllRanksHaveEntered) {
  const MarkerFolder folder;
  for (int round = 0; round < 30; ++round) {
    const std::string name = std::to_string(round) + ".";
    folder.mark(name + std::to_string(world().rank()));
    if (round % 2)
      world().barrier();
    else
      world().barrier_async().wait();
    for (int r = 0; r < world().size(); ++r)
      EXPECT_TRUE(folder.is_marked(name + std::to_string(r))) << "round " << round;
  }
}

TEST(Split, ByColorAndKey) {
  const int size = world().size();
  Group half = world().split(world().rank() % 2, -world().rank());
  EXPECT_EQ(half.size(), (size + 1 - world().rank() % 2) / 2);
  // Ordered by key: the highest rank of the world comes first.
  const at::Tensor all = at::empty({half.size()}, at::kDouble);
  half.all_gather(all, number(world().rank()));
  for (int i = 0; i + 1 < half.size(); ++i) EXPECT_EQ(all[i].item<double>(), all[i + 1].item<double>() + 2);
  EXPECT_EQ(all[half.rank()].item<double>(), world().rank());
  EXPECT_EQ(half.name(), "world." + half.name().substr(6));
  EXPECT_THAT(half.name(), HasSubstr("[" + std::to_string(world().rank() % 2) + "]"));

  Group again = half.split(0);  // equal keys keep the order of the group
  EXPECT_EQ(again.rank(), half.rank());
  EXPECT_EQ(again.size(), half.size());
  const at::Tensor one = number(1);
  again.all_reduce(one);
  EXPECT_EQ(one.item<double>(), again.size());

  Group alone = world().split(world().rank());
  EXPECT_EQ(alone.size(), 1);
  alone.all_reduce(one);
  EXPECT_EQ(one.item<double>(), again.size());
  alone.barrier();
}

TEST(Split, GroupsAreIndependent) {
  // Ranks may start asynchronous operations of two groups in different orders.
  Group a = world().split(0);
  Group b = world().split(0);
  const at::Tensor in_a = number(1);
  const at::Tensor in_b = number(10);
  if (world().rank() % 2) {
    Work first = a.all_reduce_async(in_a);
    b.all_reduce(in_b);
    first.wait();
  } else {
    Work first = b.all_reduce_async(in_b);
    a.all_reduce(in_a);
    first.wait();
  }
  EXPECT_EQ(in_a.item<double>(), world().size());
  EXPECT_EQ(in_b.item<double>(), 10 * world().size());
}

TEST(Split, TwoThreadsOnTwoGroups) {
  Group groups[] = {world().split(0), world().split(0)};
  std::vector<std::thread> threads;
  int good[] = {0, 0};
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        const at::Tensor value = number(1000 * t + i);
        groups[t].all_reduce(value);
        good[t] += value.item<double>() == (1000 * t + i) * world().size();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good[0], 100);
  EXPECT_EQ(good[1], 100);
}

/// Each rank may be the first with another one of two groups.
TEST(Split, TwoThreadsMakeGroupsAtTheSameTime) {
  Group first = world().split(0), second = world().split(0);
  // In each round, the thread that comes last differs between the ranks. It continues at once, and the other one wakes
  // up later, so ranks go on with the two groups in different orders.
  std::barrier both(2);
  const auto make_and_use = [&](const Group& parent, double value) {
    double wrong = 0;
    for (int round = 0; round < 30; ++round) {
      both.arrive_and_wait();
      if ((world().rank() + (value > 1 ? 1 : 0)) % 2 != 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const Group made = parent.split(0);
      const at::Tensor sum = number(value);
      made.all_reduce(sum);
      if (sum.item<double>() != value * world().size()) wrong = sum.item<double>();
    }
    return wrong == 0 ? value * world().size() : wrong;
  };
  double of_second = 0;
  std::thread other([&] { of_second = make_and_use(second, 100); });
  EXPECT_EQ(make_and_use(first, 1), world().size());
  other.join();
  EXPECT_EQ(of_second, 100 * world().size());
}

TEST(InvalidCalls, RejectedBeforeCommunication) {
  const int size = world().size();
  const at::Tensor good = at::zeros({4});
  const auto expect_usage_error = [](const std::string& part, auto call) {
    const std::string text = message_of<UsageError>(call);
    EXPECT_THAT(text, HasSubstr(part));
    EXPECT_EQ(text.find('\n'), std::string::npos);
  };
  if (world().rank() == 0) {  // on one rank only: an invalid call does not communicate
    expect_usage_error("mean of int64[4]", [&] { world().all_reduce(good.to(at::kLong), ReduceOp::kMean); });
    expect_usage_error("mean of bool[4]", [&] { world().reduce(good.to(at::kBool), 0, ReduceOp::kMean); });
    expect_usage_error("dtype ComplexFloat", [&] { world().all_reduce(good.to(at::kComplexFloat)); });
    expect_usage_error("undefined", [&] { world().all_reduce(at::Tensor()); });
    expect_usage_error("rank " + std::to_string(size) + " is not in world; expected 0 to",
                       [&] { world().broadcast(good, size); });
    expect_usage_error("rank -1 is not in world", [&] { world().gather(good, good, -1); });
    expect_usage_error("does not hold " + std::to_string(size) + " parts of",
                       [&] { world().all_gather(at::zeros({4 * size + 1}), good); });
    expect_usage_error("parts", [&] { world().reduce_scatter_async(good, at::zeros({4 * size}, at::kDouble)); });
    expect_usage_error("undefined", [&] { world().scatter(good, {}, 0); });
    expect_usage_error("this rank", [&] { world().send(good, 0); });
    expect_usage_error("color is -1", [&] { world().split(-1); });
    expect_usage_error("13 dimensions; expected at most 12",
                       [&] { world().all_reduce(at::zeros(std::vector<std::int64_t>(13, 1))); });
    expect_usage_error("expand()", [&] { world().all_reduce(at::zeros({1}).expand({3})); });
    expect_usage_error("expand()", [&] { world().all_gather(at::zeros({1}).expand({4 * size}), good); });
    expect_usage_error("sparse", [&] { world().all_reduce(good.to_sparse()); });
    expect_usage_error("control characters", [&] { world().barrier({.name = "two\nlines"}); });
  }
  if (size > 1 && world().rank() == 0)
    expect_usage_error("equal parts", [&] { world().all_to_all(at::zeros({size + 1}), at::zeros({size + 1})); });
  const at::Tensor one = number(1);
  world().all_reduce(one);
  EXPECT_EQ(one.item<double>(), size);
}

TEST(InvalidCalls, ExpandedTensorIsAValidSource) {
  // An expanded tensor cannot receive a result, but can be sent.
  const at::Tensor wide = number(world().rank()).expand({3});
  const at::Tensor all = at::empty({3 * world().size()}, at::kDouble);
  world().all_gather(all, wide);
  for (int r = 0; r < world().size(); ++r) EXPECT_EQ(all[3 * r + 2].item<double>(), r);
  const at::Tensor result = world().rank() == 0 ? number(7).expand({3}) : at::empty({3}, at::kDouble);
  world().broadcast(result, 0);
  EXPECT_EQ(result[2].item<double>(), 7);
}

std::size_t num_threads() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(threads), end(threads)));
}

/// Each model of a program has its own channels, and a program may create many models.
TEST(Groups, LeaveNoThreadsBehind) {
  const auto use_group = [] {
    Group group = world().split(0);
    group.all_reduce(number(1));
    group.all_reduce(at::ones({300000}));  // large enough for the cross-host path
    group.barrier();
  };
  use_group();  // threads that are created once
  const std::size_t before = num_threads();
  for (int i = 0; i < 3; ++i) use_group();
  EXPECT_LE(num_threads(), before);
}

TEST(WireDtype, IgnoredOnOneHostAndRejectedIfUnsupported) {
  const at::Tensor tensor = at::full({5}, 1.0009765625);  // not representable in bfloat16
  if (world().transport() != "tcp" && world().transport() != "mpi") {
    Group here = world().split_by_host();
    here.all_reduce(tensor, ReduceOp::kMax, {.wire_dtype = at::kBFloat16});
    EXPECT_TRUE(tensor.eq(1.0009765625).all().item<bool>());
    return;
  }
  EXPECT_THAT(tests::message_of<base::UsageError>(
                  [&] { world().all_reduce(tensor, ReduceOp::kSum, {.wire_dtype = at::kBFloat16}); }),
              ::testing::HasSubstr("does not send float32 as BFloat16; expected float32"));
}

/// Rank 0 calls barrier() on two threads, and the other ranks call it when one of the two has thrown.
TEST(Groups, TwoThreadsInOneGroupAreRefused) {
  if (world().size() == 1) return;
  Group group = world().split(0, world().rank());
  if (world().rank() != 0) {
    world().broadcast_bytes("", 0);
    group.barrier();
    return group.barrier();  // the last call of rank 0
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> errors;
  const auto call = [&] {
    try {
      group.barrier();
    } catch (const base::UsageError& error) {
      const std::lock_guard lock(mutex);
      errors.emplace_back(error.what());
      changed.notify_all();
    }
  };
  std::thread one(call), other(call);
  {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return !errors.empty(); }));
  }
  world().broadcast_bytes("go", 0);
  one.join();
  other.join();
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(errors[0].find("two threads use the group " + group.name() + " at the same time"), std::string::npos)
      << errors[0];
  group.barrier();
}

TEST(Groups, InitAgainTakesTheSameOptionsOrNone) {
  EXPECT_EQ(comm::init().name(), "world");
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { comm::init({.join_timeout = std::chrono::seconds(7)}); }),
              ::testing::HasSubstr("has already joined its job with other options"));
}

TEST(Topology, SingleHost) {
  EXPECT_EQ(world().local_rank(), world().rank());
  EXPECT_EQ(world().local_size(), world().size());
  EXPECT_EQ(world().node_rank(), 0);
  EXPECT_EQ(world().num_nodes(), 1);
  EXPECT_EQ(world().name(), "world");
  EXPECT_EQ(world().transport(),
            world().size() == 1 ? "self" : base::Env::this_process().lockstep_transport.value_or("shm"));
  EXPECT_TRUE(world().device().is_cpu());
}

}  // namespace
}  // namespace lockstep::tests::groups_test
