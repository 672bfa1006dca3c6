#include "lockstep/comm/arena/memory_shortage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "lockstep/comm/arena/arena.h"
#include "tests/support/limits/refuse_memory.h"

namespace lockstep::comm::arena {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t kMib = 1 << 20;

std::uint64_t pages_in_file(const Arena& arena) {
  struct stat status{};
  ::fstat(arena.memory().fd().get(), &status);
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

MemoryShortage shortage_of_host() {
  return {.requested_bytes = 16 * kMib,
          .host = {.available_bytes = 40 * kMib,
                   .cgroup = "",
                   .limit_bytes = 1000 * kMib,
                   .limit_source = "/proc/meminfo, MemTotal"},
          .kept_free = 96 * kMib,
          .arena_bytes = 300 * kMib,
          .shared_bytes = 500 * kMib,
          .largest_users = "process 7 (python3) 80 MiB"};
}

TEST(MemoryShortage, TextNamesRequestLimitAndUsers) {
  EXPECT_EQ(
      describe(shortage_of_host()),
      "no memory for 16 MiB more: the host has 40 MiB of 1000 MiB left (/proc/meminfo, MemTotal), and 96 MiB must stay "
      "free; this rank's arena holds 300 MiB, and the ranks of this job share 500 MiB on this host; the largest other "
      "uses of memory: process 7 (python3) 80 MiB");
  MemoryShortage refused = shortage_of_host();
  refused.error_number = ENOSPC;
  refused.largest_users.clear();
  EXPECT_THAT(describe(refused), AllOf(HasSubstr("more: the kernel refuses it (No space left on device); the host has"),
                                       Not(HasSubstr("stay free")), Not(HasSubstr("other uses"))));
}

TEST(MemoryShortage, RemedyDependsOnTheLimit) {
  MemoryShortage shortage = shortage_of_host();
  EXPECT_THAT(remedy(shortage), AllOf(HasSubstr("smaller batch, end other programs"), HasSubstr("/dev/shm")));
  shortage.host.limit_source = "/proc/meminfo, CommitLimit; vm.overcommit_memory is 2";
  EXPECT_THAT(remedy(shortage), HasSubstr("sysctl vm.overcommit_memory=0"));
  shortage.host.cgroup = "/sys/fs/cgroup/a";
  EXPECT_THAT(remedy(shortage), AllOf(HasSubstr("docker run --memory"), HasSubstr("--mem)")));
}

TEST(MemoryShortage, PagesExistBeforeTheyAreTouched) {
  Arena arena(256 * kMib, 256 * kMib);
  void* const large = arena.allocate(40 * kMib);
  EXPECT_EQ(pages_in_file(arena), 40 * kMib);
  arena.allocate(64);
  EXPECT_EQ(pages_in_file(arena), arena.stats().resident_bytes);
  arena.free(large);
  arena.allocate(40 * kMib);
  EXPECT_EQ(arena.trim(), 0u);
}

/// In a child, because the refusal cannot be undone.
TEST(MemoryShortageDeathTest, RefusalOfTheKernelIsAnError) {
  const auto allocate = [] {
    Arena arena(256 * kMib, 256 * kMib);
    void* const block = arena.allocate(kMib);
    if (!tests::refuse_fallocate()) ::_exit(77);
    try {
      arena.allocate(40 * kMib);
      ::_exit(1);
    } catch (const ArenaFull& full) {
      std::fprintf(stderr, "%s %s / %s\n", std::string(name(full.cause())).c_str(), full.what(), full.hint().c_str());
    }
    std::memset(block, 1, kMib);
    ::_exit(arena.stats().live_bytes == kMib && arena.stats().resident_bytes == kMib ? 0 : 2);
  };
  EXPECT_EXIT(
      allocate(), ::testing::ExitedWithCode(0),
      "RESOURCE arena: no memory for 40 MiB more: the kernel refuses it .No space left on device.; .* has .* MiB left "
      ".*; this rank's arena holds 1 MiB, .* / use fewer ranks");
}

TEST(MemoryShortage, ArenaFullNamesTheLimitOfTheCapacity) {
  Arena arena(8 * kMib, 8 * kMib, "ulimit -v");
  const auto error_of = [&](std::size_t bytes) -> std::string {
    try {
      arena.allocate(bytes);
    } catch (const ArenaFull& full) {
      return full.what() + std::string(" / ") + full.hint();
    }
    return "";
  };
  EXPECT_EQ(error_of(7 * kMib), "");
  const std::string limit = "ulimit -v limits the arena / raise ulimit -v, or use fewer ranks on this host";
  EXPECT_EQ(error_of(9 * kMib), "arena: a block of 9 MiB exceeds the arena's 8 MiB; " + limit);
  EXPECT_EQ(error_of(2 * kMib), "arena: no contiguous 2 MiB in the arena's 8 MiB, of which 7 MiB are in use; " + limit);
}

}  // namespace
}  // namespace lockstep::comm::arena
