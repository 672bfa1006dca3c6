#include "lockstep/base/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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
