// Tests errors of GPUs and of NCCL, with fakes of both. FAKE_NCCL_FAULT injects the error of each case (gpu.cmake).
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>

#include "lockstep/comm/group.h"
#include "tests/support/rank_main.h"

namespace lockstep::gpu_failures_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using tests::world;
using Clock = std::chrono::steady_clock;

at::Tensor ones() { return at::ones({4}).to(world().device()); }

struct CaughtError {
  std::string text = "nothing was thrown", hint, op;
  base::Cause cause = base::Cause::kInternal;
  bool timeout = false, lost = false;
};

template <typename Call>
CaughtError catch_comm_error(const Call& call) {
  try {
    call();
  } catch (const base::CommError& error) {
    return {error.what(),
            error.hint(),
            error.op(),
            error.cause(),
            dynamic_cast<const base::TimeoutError*>(&error) != nullptr,
            dynamic_cast<const base::PeerLostError*>(&error) != nullptr};
  }
  return {};
}

/// Returns the error of an all_reduce that fails on the GPU after the call has returned, so that a later call throws
/// it. The stream must become idle, although the operation cannot finish.
CaughtError run_failing_all_reduce() {
  return catch_comm_error([&] {
    const at::Tensor tensor = ones();
    world().all_reduce(tensor, comm::ReduceOp::kSum, {.name = "loss"});
    tensor.cpu();
    for (const auto until = Clock::now() + std::chrono::seconds(20); Clock::now() < until;) world().barrier();
  });
}

const std::string kFailedOnRankOne =
    "failed on rank 1, cuda:1 (GPU-00000000-0000-0000-0000-000000000002, fake GPU) of host ";

TEST(GpuFailures, OutOfMemoryInCommInit) {
  const CaughtError error = run_failing_all_reduce();
  EXPECT_EQ(error.cause, base::Cause::kResource);
  EXPECT_THAT(error.text,
              AllOf(HasSubstr("all_reduce(loss)#1: ncclCommInitRankConfig(rank 1 of 2) " + kFailedOnRankOne),
                    HasSubstr("CUDA reports cudaErrorMemoryAllocation"),
                    HasSubstr("NCCL reports: Cuda failure 2 'out of memory'")));
  EXPECT_THAT(error.hint, AllOf(HasSubstr("memory"), Not(HasSubstr("driver"))));
}

TEST(GpuFailures, DriverTooOldInFirstBroadcast) {
  const CaughtError error = catch_comm_error([] {
    world().broadcast(ones(), 0, {.name = "parameters"});
    for (const auto until = Clock::now() + std::chrono::seconds(20); Clock::now() < until;) world().barrier();
  });
  EXPECT_EQ(error.cause, base::Cause::kResource);
  EXPECT_THAT(error.text,
              AllOf(HasSubstr("broadcast(parameters)#1: ncclBroadcast(float32[4], root 0) " + kFailedOnRankOne),
                    HasSubstr("cudaErrorInsufficientDriver")));
  EXPECT_THAT(error.hint, HasSubstr("update NVIDIA's driver"));
}

TEST(GpuFailures, InvalidDeviceOrdinal) {
  const CaughtError error = run_failing_all_reduce();
  EXPECT_THAT(error.text, AllOf(HasSubstr("ncclAllReduce(float32[4], sum) " + kFailedOnRankOne),
                                HasSubstr("cudaErrorInvalidDevice")));
  EXPECT_THAT(error.hint, AllOf(HasSubstr("check that cuda:1 exists"), HasSubstr("CUDA_VISIBLE_DEVICES is not set")));
}

TEST(GpuFailures, UnknownCudaError) {
  const CaughtError error = run_failing_all_reduce();
  EXPECT_THAT(error.text, HasSubstr("a CUDA call failed"));
  EXPECT_THAT(error.hint, AllOf(HasSubstr("memory"), HasSubstr("update NVIDIA's driver"),
                                HasSubstr("CUDA_VISIBLE_DEVICES"), HasSubstr("another process")));
}

TEST(GpuFailures, SystemError) {
  const CaughtError error = run_failing_all_reduce();
  EXPECT_THAT(error.text, HasSubstr("rank 1"));
  if (world().rank() == 0) return;
  EXPECT_TRUE(error.lost);
  EXPECT_THAT(
      error.text,
      AllOf(HasSubstr("ncclAllReduce(float32[4], sum) " + kFailedOnRankOne), HasSubstr("interface wire7 of host "),
            HasSubstr("whose address for the other ranks is 127.0.0.1"), HasSubstr("Connection refused")));
  EXPECT_THAT(error.hint, AllOf(HasSubstr("LOCKSTEP_INTERFACE"), HasSubstr("firewalls"), HasSubstr("/dev/shm")));
}

TEST(GpuFailures, AsyncCudaError) {
  const CaughtError error = run_failing_all_reduce();
  EXPECT_EQ(error.cause, base::Cause::kResource);
  EXPECT_THAT(error.text, AllOf(HasSubstr("all_reduce(loss)#1: ncclAllReduce(float32[4], sum) " + kFailedOnRankOne),
                                HasSubstr("cudaErrorIllegalAddress")));
}

TEST(GpuFailures, RankNeverStartsOperation) {
  const auto begun = Clock::now();
  const CaughtError error = run_failing_all_reduce();
  EXPECT_TRUE(error.timeout) << error.text;
  EXPECT_EQ(error.cause, base::Cause::kRankStuck);
  EXPECT_THAT(error.text,
              AllOf(HasSubstr("all_reduce(loss: float32[4] on cuda)"), HasSubstr("all ranks have started it")));
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(15));
}

TEST(GpuFailures, DeadlineEndsOperation) {
  const CaughtError error = catch_comm_error([] {
    const at::Tensor tensor = ones();
    comm::Work work = world().all_reduce_async(tensor, comm::ReduceOp::kSum,
                                               {.deadline = base::Deadline::in(std::chrono::seconds(1))});
    work.wait();
  });
  EXPECT_TRUE(error.timeout) << error.text;
}

TEST(GpuFailures, RankDies) {
  if (world().rank() == 1) {
    world().all_reduce(ones(), comm::ReduceOp::kSum, {.name = "loss"});
    ::raise(SIGKILL);
  }
  const CaughtError error = run_failing_all_reduce();
  EXPECT_TRUE(error.lost) << error.text;
  EXPECT_THAT(error.text, HasSubstr("rank 1 was killed by SIGKILL"));
}

/// The operation fails on the GPU after the last call of the rank.
TEST(GpuFailures, ErrorAfterLastCall) { world().all_reduce(ones()); }

}  // namespace
}  // namespace lockstep::gpu_failures_test
