// Tests operations on GPU tensors, with fake GPUs (tests/support/gpu) or real ones: over NCCL, and through host memory
// over other transports.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <vector>

#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::gpu_test {
namespace {

using comm::ReduceOp;
using ::testing::HasSubstr;
using tests::world;

at::Device gpu() { return world().device(); }
int num_ranks() { return world().size(); }

/// Returns 1, 2, 3, ... times `factor`.
at::Tensor numbers(std::int64_t count, double factor, at::ScalarType dtype) {
  return (at::arange(1, count + 1, at::kDouble) * factor).to(dtype);
}

/// Copies a tensor to the GPU asynchronously, on the current stream.
at::Tensor on_gpu(const at::Tensor& tensor) {
  const at::Tensor pinned = at::empty(tensor.sizes(), tensor.options().pinned_memory(true)).copy_(tensor);
  return at::empty(tensor.sizes(), tensor.options().device(gpu())).copy_(pinned, /*non_blocking=*/true);
}

void expect_same(const at::Tensor& found, const at::Tensor& expected) {
  EXPECT_TRUE(found.is_cuda());
  EXPECT_TRUE(at::equal(found.cpu(), expected)) << found.cpu() << expected;
}

/// Returns 1 + 2 + ... + num_ranks().
double sum_of_ranks() { return num_ranks() * (num_ranks() + 1) / 2.0; }
int my_factor() { return world().rank() + 1; }

const at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                  at::kLong,   at::kInt,   at::kChar, at::kByte};

TEST(Gpu, DeviceOfThisRank) {
  EXPECT_EQ(gpu().type(), at::kCUDA);
  EXPECT_EQ(gpu().index(), world().local_rank() % c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount());
  EXPECT_EQ(at::empty({1}, at::TensorOptions(at::kCUDA)).device(), gpu());  // the current device
}

TEST(Gpu, AllReduce) {
  for (const at::ScalarType dtype : kDtypes) {
    const at::Tensor tensor = on_gpu(numbers(5, my_factor(), dtype));
    world().all_reduce(tensor);
    expect_same(tensor, numbers(5, sum_of_ranks(), dtype));
  }
  const at::Tensor mean = on_gpu(numbers(7, 2 * my_factor(), at::kFloat));
  world().all_reduce(mean, ReduceOp::kMean);
  expect_same(mean, numbers(7, num_ranks() + 1, at::kFloat));
  const at::Tensor least = on_gpu(numbers(7, my_factor(), at::kFloat)),
                   greatest = on_gpu(numbers(7, my_factor(), at::kFloat));
  world().all_reduce(least, ReduceOp::kMin);
  world().all_reduce(greatest, ReduceOp::kMax);
  expect_same(least, numbers(7, 1, at::kFloat));
  expect_same(greatest, numbers(7, num_ranks(), at::kFloat));
  const at::Tensor any = on_gpu(at::arange(num_ranks()).eq(world().rank())),
                   all = on_gpu(at::arange(num_ranks() + 1).ne(world().rank()));
  world().all_reduce(any);
  world().all_reduce(all, ReduceOp::kProduct);
  expect_same(any, at::ones({num_ranks()}, at::kBool));
  expect_same(all, at::arange(num_ranks() + 1).eq(num_ranks()));
}

TEST(Gpu, RootedCollectives) {
  for (int root = 0; root < num_ranks(); ++root) {
    const at::Tensor given = on_gpu(numbers(6, my_factor(), at::kFloat));
    world().broadcast(given, root);
    expect_same(given, numbers(6, root + 1, at::kFloat));
    const at::Tensor sum = on_gpu(numbers(6, my_factor(), at::kFloat));
    world().reduce(sum, root);
    if (world().rank() == root) expect_same(sum, numbers(6, sum_of_ranks(), at::kFloat));
    const bool here = world().rank() == root;
    const at::Tensor gathered = here ? at::empty({num_ranks(), 3}, at::TensorOptions(gpu())) : at::Tensor();
    world().gather(gathered, on_gpu(numbers(3, my_factor(), at::kFloat)), root);
    if (here) expect_same(gathered[num_ranks() - 1], numbers(3, num_ranks(), at::kFloat));
    const at::Tensor part = at::empty({2}, at::TensorOptions(gpu()));
    world().scatter(part, here ? on_gpu(numbers(2 * num_ranks(), 1, at::kFloat)) : at::Tensor(), root);
    expect_same(part, numbers(2 * num_ranks(), 1, at::kFloat).narrow(0, 2 * world().rank(), 2));
  }
}

TEST(Gpu, UnrootedCollectives) {
  const at::Tensor all = at::empty({num_ranks() * 4}, at::TensorOptions(gpu()));
  world().all_gather(all, on_gpu(numbers(4, my_factor(), at::kFloat)));
  for (int rank = 0; rank < num_ranks(); ++rank)
    expect_same(all.narrow(0, 4 * rank, 4), numbers(4, rank + 1, at::kFloat));
  const at::Tensor part = at::empty({3}, at::TensorOptions(gpu()));
  world().reduce_scatter(part, on_gpu(numbers(3 * num_ranks(), my_factor(), at::kFloat)));
  expect_same(part, numbers(3 * num_ranks(), sum_of_ranks(), at::kFloat).narrow(0, 3 * world().rank(), 3));
  const at::Tensor exchanged = at::empty({num_ranks()}, at::TensorOptions(gpu()));
  world().all_to_all(exchanged, on_gpu(numbers(num_ranks(), 10 * my_factor(), at::kFloat)));
  expect_same(exchanged, numbers(num_ranks(), 10, at::kFloat) * my_factor());
}

TEST(Gpu, SeveralOperationsInFlight) {
  std::vector<at::Tensor> tensors;
  std::vector<comm::Work> works;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(on_gpu(numbers(5, my_factor() + i, at::kFloat)));
    works.push_back(world().all_reduce_async(tensors.back()));
  }
  const at::Tensor on_cpu = numbers(5, my_factor(), at::kFloat);
  world().all_reduce(on_cpu);
  EXPECT_TRUE(at::equal(on_cpu, numbers(5, sum_of_ranks(), at::kFloat)));
  for (int i = 0; i < 4; ++i) {
    works[static_cast<std::size_t>(i)].wait();
    expect_same(tensors[static_cast<std::size_t>(i)], numbers(5, sum_of_ranks() + i * num_ranks(), at::kFloat));
  }
}

/// Keeps streams busy for a while: a fake GPU delays every copy, and a real one needs a fraction of a millisecond for
/// half a gigabyte.
class Delay {
 public:
  void on(const at::Stream& stream) {
    const c10::StreamGuard guard(stream);
    to_.copy_(from_, /*non_blocking=*/true);
  }

 private:
  const std::int64_t bytes_ = std::getenv("FAKE_GPUS") ? 1 : 1 << 29;
  const at::Tensor from_ = at::empty({bytes_}, at::TensorOptions(gpu()).dtype(at::kByte));
  const at::Tensor to_ = at::empty_like(from_);
};

/// Every stream of libtorch's pool is delayed in turn, among them the one on which NCCL or the copies to the host run.
TEST(Gpu, DelayOnAnyStreamChangesNoBits) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  std::vector<at::Stream> streams = {guard.getDefaultStream(gpu())};
  for (int i = 0; i < 32; ++i)
    for (const bool high_priority : {false, true})
      streams.push_back(guard.getStreamFromGlobalPool(gpu(), high_priority));
  Delay delay;
  for (const at::Stream& stream : streams)
    for (int place = 0; place < 3; ++place) {
      if (place == 0) delay.on(stream);
      at::Tensor tensor = on_gpu(numbers(1000, my_factor(), at::kFloat));
      if (place == 1) delay.on(stream);
      comm::Work work = world().all_reduce_async(tensor);
      if (place == 2) delay.on(stream);
      work.wait();
      tensor = tensor * 2;
      ASSERT_TRUE(at::equal(tensor.cpu(), numbers(1000, 2 * sum_of_ranks(), at::kFloat)))
          << "a delay of " << stream << " in place " << place;
    }
}

TEST(Gpu, AllRanksMaySendBeforeReceiving) {
  if (num_ranks() == 1) return;
  const int next = (world().rank() + 1) % num_ranks(), before = (world().rank() + num_ranks() - 1) % num_ranks();
  const at::Tensor sent = on_gpu(numbers(9, my_factor(), at::kFloat)),
                   more = on_gpu(numbers(4, 10 * my_factor(), at::kInt));
  comm::Work first = world().send_async(sent, next), second = world().send_async(more, next);
  const at::Tensor got = at::empty({9}, at::TensorOptions(gpu())),
                   rest = at::empty({4}, at::TensorOptions(gpu()).dtype(at::kInt));
  world().recv(got, before);
  comm::Work last = world().recv_async(rest, before);
  last.wait();
  expect_same(got, numbers(9, before + 1, at::kFloat));
  expect_same(rest, numbers(4, 10 * (before + 1), at::kInt));
  first.wait();
  second.wait();
}

TEST(Gpu, SplitGroups) {
  world().all_reduce(on_gpu(numbers(1, 1, at::kFloat)));  // creates the communicator that NCCL then splits
  comm::Group parity = world().split(world().rank() % 2, -world().rank());
  double expected = 0;
  for (int rank = world().rank() % 2; rank < num_ranks(); rank += 2) expected += rank + 1;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor tensor = on_gpu(numbers(5, my_factor(), at::kFloat));
    parity.all_reduce(tensor);
    expect_same(tensor, numbers(5, expected, at::kFloat));
  }
  comm::Group alone = world().split(world().rank());
  const at::Tensor same = on_gpu(numbers(5, my_factor(), at::kFloat));
  alone.all_reduce(same);
  expect_same(same, numbers(5, my_factor(), at::kFloat));
}

/// Two models make two groups one after the other, and NCCL takes half a second for each. The operations before,
/// between and after them may still be in progress.
TEST(Gpu, SplitsInARow) {
  const at::Tensor before = on_gpu(numbers(5, my_factor(), at::kFloat)), between = before.clone();
  comm::Work first = world().all_reduce_async(before);
  comm::Group one = world().split(0);
  comm::Work second = world().all_reduce_async(between);
  comm::Group two = world().split(0, -world().rank());
  {
    comm::Group unused = world().split(0);
  }
  const at::Tensor in_two = on_gpu(numbers(7, my_factor(), at::kFloat)), in_one = in_two.clone();
  comm::Work third = two.all_reduce_async(in_two), fourth = one.all_reduce_async(in_one);
  for (comm::Work* work : {&fourth, &third, &second, &first}) work->wait();
  for (const at::Tensor& five : {before, between}) expect_same(five, numbers(5, sum_of_ranks(), at::kFloat));
  for (const at::Tensor& seven : {in_one, in_two}) expect_same(seven, numbers(7, sum_of_ranks(), at::kFloat));
}

TEST(Gpu, WrongDevicesAreRejected) {
  if (num_ranks() == 1) return;
  const auto text_of = [](const auto& call) -> std::string { return tests::message_of<base::UsageError>(call); };
  const at::Tensor here = on_gpu(numbers(2, 1, at::kFloat)), host = at::empty({2 * num_ranks()});
  EXPECT_THAT(text_of([&] { world().all_gather(host, here); }), HasSubstr("both must be on one device"));
  if (c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() < 2) return;
  const at::Tensor there = at::empty({2}, at::TensorOptions(at::Device(at::kCUDA, gpu().index() == 0 ? 1 : 0)));
  EXPECT_THAT(text_of([&] { world().all_reduce(there); }), HasSubstr("but this rank's GPU is " + gpu().str()));
}

TEST(GpuDesync, OneRankOnCpu) {
  if (num_ranks() == 1) GTEST_SKIP();
  const at::Tensor host = numbers(3, 1, at::kFloat);
  EXPECT_THAT(
      tests::message_of<base::DesyncError>([&] { world().all_reduce(world().rank() == 0 ? host : on_gpu(host)); }),
      HasSubstr("rank 0 called all_reduce(float32[3]), rank 1 called all_reduce(float32[3] on cuda)"));
}

}  // namespace
}  // namespace lockstep::gpu_test
