#include "lockstep/comm/nccl/failure.h"

#include <gmock/gmock.h>

#include "lockstep/base/error.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const NcclPlace kPlace{.rank = 3,
                       .gpu = {.index = 1, .name = "NVIDIA H100", .uuid = "GPU-7"},
                       .host = "beta",
                       .address = "10.0.0.7",
                       .visible_gpus = "0,1"};

struct Told {
  std::string text, hint;
  base::Cause cause = base::Cause::kInternal;
  bool comm = false;
};

Told told(const NcclFailure& failure, const NcclPlace& place = kPlace) {
  try {
    std::rethrow_exception(explain(failure, place));
  } catch (const base::CommError& error) {
    EXPECT_EQ(error.op(), failure.op);
    EXPECT_EQ(error.rank(), place.rank);
    EXPECT_EQ(error.peer(), place.rank);  // at fault
    return {error.what(), error.hint(), error.cause(), true};
  } catch (const base::Error& error) {
    return {error.what(), error.hint(), error.cause()};
  }
}

NcclFailure failure_of(int result, std::string said = "") {
  return {.result = result,
          .op = "broadcast(parameters)#1",
          .call = "ncclBroadcast(float32[9], root 0)",
          .said = std::move(said)};
}

TEST(NcclFailure, FindsTheNumberInWhatNcclSays) {
  EXPECT_EQ(cuda_error_in("transport.cc:128 NCCL WARN Cuda failure 2 'out of memory'"), 2);
  EXPECT_EQ(cuda_error_in("Cuda failure 1 'x'; Cuda failure 719 'y'"), 719);
  EXPECT_EQ(cuda_error_in("Cuda failure"), 0);
  EXPECT_EQ(cuda_error_in("Cuda failure 'out of memory'"), 0);
  EXPECT_EQ(cuda_error_in(""), 0);
}

TEST(NcclFailure, OfCudaSaysWhichGpuWhatAndWhatToDo) {
  const Told memory = told(failure_of(1, "init.cc\nCuda failure 2 'out of memory'\n"));
  EXPECT_EQ(memory.text,
            "broadcast(parameters)#1: ncclBroadcast(float32[9], root 0) failed on rank 3, cuda:1 (GPU-7, NVIDIA H100) "
            "of host beta: CUDA says cudaErrorMemoryAllocation; NCCL says: init.cc; "
            "Cuda failure 2 'out of memory'");
  EXPECT_TRUE(memory.comm);
  EXPECT_EQ(memory.cause, base::Cause::kResource);
  EXPECT_THAT(memory.hint, AllOf(HasSubstr("memory full"), Not(HasSubstr("driver"))));
  EXPECT_THAT(told(failure_of(1, "Cuda failure 35 ''")).hint, HasSubstr("driver too old"));
  EXPECT_THAT(told(failure_of(1, "Cuda failure 101 ''")).hint,
              HasSubstr("is cuda:1 there? CUDA_VISIBLE_DEVICES is 0,1"));
  EXPECT_THAT(told(failure_of(1, "Cuda failure 46 ''")).hint, HasSubstr("another process"));
  EXPECT_THAT(told(failure_of(1, "Cuda failure 54321 ''")).text, HasSubstr("CUDA says error 54321"));
}

TEST(NcclFailure, OfCudaTakesTheRuntimesErrorWhenNcclNamesNone) {
  NcclFailure failure = failure_of(1);
  failure.cuda_error = 719;
  EXPECT_THAT(told(failure).text, HasSubstr("cudaErrorLaunchFailure"));
  EXPECT_THAT(told(failure_of(1)).text, HasSubstr("CUDA refused something"));
}

TEST(NcclFailure, OfTheSystemNamesInterfaceHostAndWhatToCheck) {
  const Told chosen = told(failure_of(2, "Connection timed out"));
  EXPECT_FALSE(chosen.comm);  // a peer's end may be why
  EXPECT_EQ(chosen.cause, base::Cause::kPeerUnreachable);
  EXPECT_THAT(chosen.text,
              AllOf(HasSubstr("NCCL_SOCKET_IFNAME is not set) of host beta, whose address for the others is 10.0.0.7"),
                    HasSubstr("Connection timed out")));
  EXPECT_THAT(chosen.hint, AllOf(HasSubstr("LOCKSTEP_INTERFACE"), HasSubstr("lockstep doctor"), HasSubstr("firewalls"),
                                 HasSubstr("/dev/shm"), HasSubstr("ulimit")));
  NcclPlace named = kPlace;
  named.interface = "ib0";
  EXPECT_THAT(told(failure_of(2), named).text, HasSubstr("interface ib0 of host beta"));
  EXPECT_EQ(told(failure_of(6)).cause, base::Cause::kPeerUnreachable);
}

TEST(NcclFailure, OfUseAndOfNcclItself) {
  EXPECT_EQ(told(failure_of(5, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")).cause,
            base::Cause::kConfigMismatch);
  EXPECT_THAT(told(failure_of(5, "Duplicate GPU detected")).hint, HasSubstr("two ranks use one GPU"));
  EXPECT_EQ(told(failure_of(3)).cause, base::Cause::kInternal);
}

TEST(NcclFailure, IsOneLineOfBearableLength) {
  std::string said(5000, 'x');
  said += "\nthe end\x1b[0m";
  const Told long_one = told(failure_of(1, said));
  EXPECT_LT(long_one.text.size(), 1000U);
  EXPECT_THAT(long_one.text, AllOf(Not(HasSubstr("\n")), Not(HasSubstr("\x1b")), HasSubstr("the end")));
}

}  // namespace
}  // namespace lockstep::comm
