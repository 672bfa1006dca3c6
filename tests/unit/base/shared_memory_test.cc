#include "lockstep/base/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

/// As with a timer whose signals interrupt each call that takes longer than a page does.
TEST(SharedMemoryDeathTest, SignalsDoNotKeepPagesFromBeingReserved) {
  const auto reserve = [] {
    const SharedMemory memory = SharedMemory::create("lockstep-test", 32 * kMib);
    if (!tests::refuse_fallocate(EINTR, 8192)) ::_exit(77);
    ::alarm(20);  // instead of an endless loop
    struct stat status{};
    const bool is_reserved = memory.reserve(0, 5 * kMib) == 0 && ::fstat(memory.fd().get(), &status) == 0;
    ::_exit(is_reserved && static_cast<std::size_t>(status.st_blocks) * 512 == 5 * kMib ? 0 : 1);
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

class PrivateViews : public testing::TestWithParam<PrivateView::Detection> {
 protected:
  static constexpr std::size_t kPages = 5000;  // more than one read of /proc/self/pagemap
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const SharedMemory memory = SharedMemory::create("lockstep-test", (kPages + 5) * page);
  PrivateView view{memory, kPages * page, GetParam()};
};

MATCHER_P2(IsRange, begin, end, "") { return arg.begin == begin && arg.end == end; }

TEST_P(PrivateViews, WritesAreFoundAndNotShared) {
  EXPECT_THAT(view.changes(), testing::IsEmpty());
  memory.data()[0] = 1;
  EXPECT_EQ(view.data()[0], 1);
  for (const std::size_t written : {std::size_t{2}, std::size_t{3}, kPages - 1}) view.data()[written * page + 9] = 7;
  EXPECT_EQ(memory.data()[2 * page + 9], 0);
  memory.data()[4 * page] = 5;  // of other pages, what others write is visible
  EXPECT_EQ(view.data()[4 * page], 5);
  EXPECT_THAT(view.changes(),
              testing::ElementsAre(IsRange(2 * page, 4 * page), IsRange((kPages - 1) * page, kPages * page)));
}

TEST_P(PrivateViews, WritesThatChangeNothingAreDropped) {
  view.data()[page] = 7;
  view.data()[page] = 0;
  EXPECT_THAT(view.changes(), testing::IsEmpty());
  memory.data()[page] = 3;
  EXPECT_EQ(view.data()[page], 3);
}

TEST_P(PrivateViews, DroppedPagesShowTheSharedMemory) {
  view.data()[page] = 7;
  const auto changes = view.changes();
  ASSERT_THAT(changes, testing::ElementsAre(IsRange(page, 2 * page)));
  memory.data()[page] = 3;
  view.drop(changes);
  EXPECT_EQ(view.data()[page], 3);
  EXPECT_THAT(view.changes(), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PrivateViews,
                         testing::Values(PrivateView::Detection::kPagemap, PrivateView::Detection::kCompare),
                         [](const auto& tested) {
                           return tested.param == PrivateView::Detection::kPagemap ? "Pagemap" : "Compare";
                         });

}  // namespace
}  // namespace lockstep::base
