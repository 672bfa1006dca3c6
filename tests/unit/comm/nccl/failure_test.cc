#include "lockstep/comm/nccl/failure.h"

#include <gmock/gmock.h>

#include "lockstep/base/error.h"

namespace lockstep::comm::nccl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const NcclLocation kLocation{.rank = 3,
                             .gpu = {.index = 1, .name = "NVIDIA H100", .uuid = "GPU-7"},
                             .host = "beta",
                             .address = "10.0.0.7",
                             .visible_gpus = "0,1"};

struct CaughtError {
  std::string text, hint;
  base::Cause cause = base::Cause::kInternal;
  bool comm = false;
};

CaughtError catch_error(const NcclFailure& failure, const NcclLocation& location = kLocation) {
  try {
    std::rethrow_exception(to_exception(failure, location));
  } catch (const base::CommError& error) {
    EXPECT_EQ(error.op(), failure.op);
    EXPECT_EQ(error.rank(), location.rank);
    EXPECT_EQ(error.peer(), location.rank);  // at fault
    return {error.what(), error.hint(), error.cause(), true};
  } catch (const base::Error& error) {
    return {error.what(), error.hint(), error.cause()};
  }
}

NcclFailure failure_of(int result, std::string last_error = "") {
  return {.result = result,
          .op = "broadcast(parameters)#1",
          .call = "ncclBroadcast(float32[9], root 0)",
          .last_error = std::move(last_error)};
}

TEST(NcclFailure, ParsesTheCudaErrorNumber) {
  EXPECT_EQ(parse_cuda_error("transport.cc:128 NCCL WARN Cuda failure 2 'out of memory'"), 2);
  EXPECT_EQ(parse_cuda_error("Cuda failure 1 'x'; Cuda failure 719 'y'"), 719);
  EXPECT_EQ(parse_cuda_error("Cuda failure"), 0);
  EXPECT_EQ(parse_cuda_error("Cuda failure 'out of memory'"), 0);
  EXPECT_EQ(parse_cuda_error(""), 0);
}

TEST(NcclFailure, CudaErrorNamesGpuErrorAndRemedy) {
  const CaughtError memory = catch_error(failure_of(1, "init.cc\nCuda failure 2 'out of memory'\n"));
  EXPECT_EQ(memory.text,
            "broadcast(parameters)#1: ncclBroadcast(float32[9], root 0) failed on rank 3, cuda:1 (GPU-7, NVIDIA H100) "
            "of host beta: CUDA reports cudaErrorMemoryAllocation; NCCL reports: init.cc; Cuda failure 2 'out of "
            "memory'");
  EXPECT_TRUE(memory.comm);
  EXPECT_EQ(memory.cause, base::Cause::kResource);
  EXPECT_THAT(memory.hint, AllOf(HasSubstr("free memory on the GPU"), Not(HasSubstr("driver"))));
  EXPECT_THAT(catch_error(failure_of(1, "Cuda failure 35 ''")).hint, HasSubstr("update NVIDIA's driver"));
  EXPECT_THAT(catch_error(failure_of(1, "Cuda failure 101 ''")).hint,
              HasSubstr("check that cuda:1 exists (CUDA_VISIBLE_DEVICES is 0,1)"));
  EXPECT_THAT(catch_error(failure_of(1, "Cuda failure 46 ''")).hint, HasSubstr("another process"));
  EXPECT_THAT(catch_error(failure_of(1, "Cuda failure 54321 ''")).text, HasSubstr("CUDA reports error 54321"));
}

TEST(NcclFailure, CudaErrorFallsBackToTheRuntimesLastError) {
  NcclFailure failure = failure_of(1);
  failure.cuda_error = 719;
  EXPECT_THAT(catch_error(failure).text, HasSubstr("cudaErrorLaunchFailure"));
  EXPECT_THAT(catch_error(failure_of(1)).text, HasSubstr("a CUDA call failed"));
}

TEST(NcclFailure, SystemErrorNamesInterfaceHostAndChecks) {
  const CaughtError selected = catch_error(failure_of(2, "Connection timed out"));
  EXPECT_FALSE(selected.comm);  // the end of a peer may be the cause
  EXPECT_EQ(selected.cause, base::Cause::kPeerUnreachable);
  EXPECT_THAT(
      selected.text,
      AllOf(HasSubstr("NCCL_SOCKET_IFNAME is not set) of host beta, whose address for the other ranks is 10.0.0.7"),
            HasSubstr("Connection timed out")));
  EXPECT_THAT(selected.hint, AllOf(HasSubstr("LOCKSTEP_INTERFACE"), HasSubstr("lockstep doctor"),
                                   HasSubstr("firewalls"), HasSubstr("/dev/shm"), HasSubstr("ulimit")));
  NcclLocation named = kLocation;
  named.interface = "ib0";
  EXPECT_THAT(catch_error(failure_of(2), named).text, HasSubstr("interface ib0 of host beta"));
  EXPECT_EQ(catch_error(failure_of(6)).cause, base::Cause::kPeerUnreachable);
}

TEST(NcclFailure, InvalidUsageAndInternalErrors) {
  EXPECT_EQ(catch_error(failure_of(5, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")).cause,
            base::Cause::kConfigMismatch);
  EXPECT_THAT(catch_error(failure_of(5, "Duplicate GPU detected")).hint, HasSubstr("two ranks use one GPU"));
  EXPECT_EQ(catch_error(failure_of(3)).cause, base::Cause::kInternal);
}

TEST(NcclFailure, TextIsOneLineOfBoundedLength) {
  std::string last_error(5000, 'x');
  last_error += "\nthe end\x1b[0m";
  const CaughtError long_one = catch_error(failure_of(1, last_error));
  EXPECT_LT(long_one.text.size(), 1000U);
  EXPECT_THAT(long_one.text, AllOf(Not(HasSubstr("\n")), Not(HasSubstr("\x1b")), HasSubstr("the end")));
}

}  // namespace
}  // namespace lockstep::comm::nccl
