#include "lockstep/base/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>

#include "lockstep/base/error.h"
#include "tests/support/limits/refuse_memory.h"

namespace lockstep::base {
namespace {

constexpr std::size_t kMib = 1 << 20;

TEST(SharedMemory, ReservedPagesExistAndKeepTheirContents) {
  const SharedMemory memory = SharedMemory::create("lockstep-test", 32 * kMib);
  memory.data()[9 * kMib] = 7;
  ASSERT_EQ(memory.reserve(8 * kMib, 9 * kMib), 0);
  struct stat status{};
  ASSERT_EQ(::fstat(memory.fd().get(), &status), 0);
  EXPECT_EQ(static_cast<std::size_t>(status.st_blocks) * 512, 9 * kMib);
  EXPECT_EQ(memory.data()[9 * kMib], 7);
}

TEST(SharedMemory, SignalsDoNotKeepPagesFromBeingReserved) {
  const SharedMemory memory = SharedMemory::create("lockstep-test", 256 * kMib);
  struct sigaction ignored{}, before{};
  ignored.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGALRM, &ignored, &before), 0);
  const itimerval often{{0, 100}, {0, 100}}, never{};  // 100 us: shorter than the allocation of 4 MiB
  ::setitimer(ITIMER_REAL, &often, nullptr);
  const int error = memory.reserve(0, memory.size());
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_EQ(error, 0);
  struct stat status{};
  ASSERT_EQ(::fstat(memory.fd().get(), &status), 0);
  EXPECT_EQ(static_cast<std::size_t>(status.st_blocks) * 512, memory.size());
}

TEST(SharedMemory, InterleavedPagesHaveThisPolicy) {
  const SharedMemory memory = SharedMemory::create("lockstep-test", kMib);
  memory.interleave();
  ASSERT_EQ(memory.reserve(0, kMib), 0);
  int policy = 0;
  if (::syscall(SYS_get_mempolicy, &policy, nullptr, 0, memory.data(), MPOL_F_ADDR) != 0)
    GTEST_SKIP() << "the system does not permit memory policies";
  EXPECT_EQ(policy, MPOL_INTERLEAVE);
}

/// In a child, because the refusal cannot be undone.
TEST(SharedMemoryDeathTest, RefusalOfTheKernelIsReturned) {
  const auto reserve = [] {
    const SharedMemory memory = SharedMemory::create("lockstep-test", 32 * kMib);
    if (!tests::refuse_fallocate()) ::_exit(77);
    ::_exit(memory.reserve(0, kMib) == ENOSPC ? 0 : 1);
  };
  EXPECT_EXIT(reserve(), ::testing::ExitedWithCode(0), "");
}

/// The kernel would send SIGXFSZ.
TEST(SharedMemoryDeathTest, LimitOnFileSizesIsAnError) {
  const auto create = [] {
    const rlimit limit{.rlim_cur = kMib, .rlim_max = kMib};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    SharedMemory::create("lockstep-test", kMib);
    try {
      SharedMemory::create("lockstep-test", 2 * kMib);
    } catch (const SystemError& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(error.cause() == Cause::kResource ? 0 : 1);
    }
    ::_exit(2);
  };
  EXPECT_EXIT(create(), ::testing::ExitedWithCode(0),
              "cannot allocate 2097152 bytes of shared memory .ulimit -f is 1048576 bytes.: File too large");
}

}  // namespace
}  // namespace lockstep::base
