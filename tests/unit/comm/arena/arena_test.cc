#include "lockstep/comm/arena/arena.h"

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>

#include "lockstep/comm/arena/cpu_allocator.h"
#include "tests/support/sanitizer.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm::arena {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kMiB = 1 << 20;

std::string arena_full_text(const std::function<void()>& call) { return tests::message_of<ArenaFull>(call); }

TEST(Arena, BlocksOfAllSizesAreAlignedDisjointAndKeepTheirContents) {
  Arena arena(256 * kMiB, 256 * kMiB);
  std::mt19937 random(3);
  struct Block {
    char* begin;
    std::size_t size;
    char fill;
  };
  std::vector<Block> blocks;
  const auto check = [](const Block& b) {
    for (std::size_t i = 0; i < b.size; i += 61) ASSERT_EQ(b.begin[i], b.fill);
    ASSERT_EQ(b.begin[b.size - 1], b.fill);
  };
  for (int turn = 0; turn < 6000; ++turn) {
    if (blocks.size() < 300 || random() % 2 == 0) {
      const std::size_t size = 1 + (random() % 8 == 0 ? random() % 300000 : random() % 3000);
      auto* begin = static_cast<char*>(arena.allocate(size));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(begin) % 64, 0u);
      ASSERT_TRUE(arena.contains(begin));
      const char fill = static_cast<char>(turn);
      std::memset(begin, fill, size);
      blocks.push_back({begin, size, fill});
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      check(blocks.back());
      arena.free(blocks.back().begin);
      blocks.pop_back();
    }
  }
  for (const Block& b : blocks) {
    check(b);
    arena.free(b.begin);
  }
  // One empty slab per size class remains.
  EXPECT_EQ(arena.stats().live_bytes, arena.stats().slab_bytes);
  EXPECT_LT(arena.stats().slab_bytes, 8 * kMiB);
}

TEST(Arena, AllocatingZeroBytesReturnsNull) {
  Arena arena(kMiB, kMiB);
  EXPECT_EQ(arena.allocate(0), nullptr);
  arena.free(nullptr);
  int elsewhere = 0;
  EXPECT_FALSE(arena.contains(&elsewhere));
}

TEST(Arena, FreedMemoryIsReusedAndTrimReturnsIt) {
  Arena arena(64 * kMiB, 64 * kMiB);
  void* first = arena.allocate(8 * kMiB);
  std::memset(first, 1, 8 * kMiB);
  EXPECT_EQ(arena.stats().resident_bytes, 8 * kMiB);
  arena.free(first);
  EXPECT_EQ(arena.stats().resident_bytes, 8 * kMiB) << "kept for the next allocation";
  void* second = arena.allocate(8 * kMiB);
  EXPECT_EQ(second, first);
  EXPECT_EQ(static_cast<char*>(second)[5], 1);
  EXPECT_EQ(arena.trim(), 0u) << "in use";
  arena.free(second);
  EXPECT_EQ(arena.trim(), 8 * kMiB);
  EXPECT_EQ(arena.stats().resident_bytes, 0u);
  EXPECT_EQ(static_cast<char*>(arena.allocate(8 * kMiB))[5], 0) << "the kernel provided new pages";
}

TEST(Arena, ArenaFullNamesTheLimit) {
  Arena small(8 * kMiB, 4 * kMiB);
  EXPECT_THAT(arena_full_text([&] { small.allocate(5 * kMiB); }),
              HasSubstr("5 MiB more would exceed its limit of 4 MiB; 0 MiB are in use"));
  EXPECT_THAT(arena_full_text([&] { small.allocate(9 * kMiB); }),
              HasSubstr("a block of 9 MiB exceeds the arena's 8 MiB"));
  void* three = small.allocate(3 * kMiB);
  EXPECT_THAT(arena_full_text([&] { small.allocate(2 * kMiB); }), HasSubstr("limit of 4 MiB; 3 MiB are in use"));
  small.free(three);
  small.free(small.allocate(4 * kMiB - 4096));  // allocate() first returns freed pages to the kernel
  EXPECT_EQ(small.stats().live_bytes, 0u);
  if (tests::kIsSanitized) return;  // which leaves less address space
  Arena large(std::size_t{1} << 40, std::size_t{1} << 40);
  EXPECT_THAT(arena_full_text([&] { large.allocate(std::size_t{1} << 39); }),
              AllOf(HasSubstr("arena: no memory for 524288 MiB more: "), HasSubstr(" MiB left")));
}

TEST(Arena, ThreadsAllocateConcurrently) {
  Arena arena(512 * kMiB, 512 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&arena, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::pair<char*, std::size_t>> mine;
      for (int turn = 0; turn < 5000; ++turn) {
        const std::size_t size = 1 + random() % 100000;
        auto* block = static_cast<char*>(arena.allocate(size));
        block[0] = block[size - 1] = static_cast<char>(t);
        mine.emplace_back(block, size);
        if (mine.size() < 50) continue;
        std::swap(mine[random() % mine.size()], mine.back());
        EXPECT_EQ(mine.back().first[0], static_cast<char>(t));
        EXPECT_EQ(mine.back().first[mine.back().second - 1], static_cast<char>(t));
        arena.free(mine.back().first);
        mine.pop_back();
      }
      for (const auto& [block, size] : mine) arena.free(block);
    });
  for (auto& thread : threads) thread.join();  // bounded: the loops above end
  EXPECT_EQ(arena.stats().live_bytes, arena.stats().slab_bytes);
}

TEST(Arena, SteadyLoadOfVaryingSizesDoesNotGrow) {
  Arena arena(std::size_t{4} << 30, std::size_t{4} << 30);
  std::mt19937 random(1);
  std::uint64_t after_warmup = 0;
  for (int step = 0; step < 2000; ++step) {
    const std::size_t batch = 16 + random() % 49;
    std::vector<void*> activations;
    for (int layer = 0; layer < 6; ++layer) activations.push_back(arena.allocate(batch * 4096));
    for (int layer = 5; layer >= 0; --layer) {
      void* gradient = arena.allocate(batch * 4096);
      arena.free(activations[static_cast<std::size_t>(layer)]);
      arena.free(gradient);
    }
    if (step == 200) after_warmup = arena.stats().high_water_bytes;
  }
  EXPECT_EQ(arena.stats().high_water_bytes, after_warmup);
  EXPECT_LE(static_cast<double>(arena.stats().high_water_bytes),
            1.15 * static_cast<double>(arena.stats().peak_live_bytes));
}

/// Makes libtorch allocate CPU tensors outside the arena, as before install_arena().
void uninstall_arena() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/10); }

/// Installs the arena of this process for each test.
class InstalledArena : public ::testing::Test {
 protected:
  void SetUp() override { install_arena(); }
  void TearDown() override { uninstall_arena(); }
};

TEST_F(InstalledArena, NewTensorsAreInTheArenaAndOldOnesStayOutside) {
  uninstall_arena();
  const at::Tensor outside = torch::ones({1000});
  install_arena();
  const at::Tensor inside = torch::ones({1000});
  EXPECT_FALSE(Arena::this_process().contains(outside.const_data_ptr()));
  EXPECT_TRUE(Arena::this_process().contains(inside.const_data_ptr()));
  EXPECT_TRUE(Arena::this_process().contains((outside + inside).const_data_ptr()));
  uninstall_arena();
  EXPECT_FALSE(Arena::this_process().contains(torch::ones({10}).const_data_ptr()));
  EXPECT_EQ(inside.sum().item<float>(), 1000);
}

TEST_F(InstalledArena, GradientsAreInTheArena) {
  const at::Tensor weight = torch::randn({300, 200}).requires_grad_();
  torch::mm(torch::randn({64, 300}), weight).sum().backward();
  EXPECT_TRUE(Arena::this_process().contains(weight.grad().const_data_ptr()));
}

TEST_F(InstalledArena, OutOfMemoryThrowsC10OutOfMemoryError) {
  EXPECT_THROW(torch::empty({std::int64_t{1} << 50}, torch::kByte), c10::OutOfMemoryError);
}

TEST_F(InstalledArena, ForkedChildHasTensorsOfItsOwn) {
  at::Tensor tensor = torch::full({100000}, 3.0f), freed = torch::full({100000}, 4.0f);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char go = 0;
    const bool seen = ::read(ends[0], &go, 1) == 1 && tensor.data_ptr<float>()[99999] == 3.0f &&
                      freed.data_ptr<float>()[99999] == 4.0f;
    tensor.data_ptr<float>()[5] = 7.0f;
    void* block = Arena::this_process().allocate(100000);
    std::memset(block, 1, 100000);
    ::_exit(seen && tensor.data_ptr<float>()[5] == 7.0f ? 0 : 1);
  }
  tensor.fill_(8.0f);
  freed = at::Tensor();
  const at::Tensor reused = torch::full({100000}, 9.0f);
  ASSERT_EQ(::write(ends[1], "g", 1), 1);
  ::close(ends[0]);
  ::close(ends[1]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(tensor.data_ptr<float>()[5], 8.0f);
  EXPECT_EQ(tensor.sum().item<float>(), 800000);
}

TEST_F(InstalledArena, ForkedChildDoesNotTrimThePagesOfItsParent) {
  Arena& arena = Arena::this_process();
  arena.free(arena.allocate(8 * kMiB));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char go = 0;
    const bool told = ::read(ends[0], &go, 1) == 1;
    arena.trim();
    ::_exit(told ? 0 : 1);
  }
  auto* const block = static_cast<char*>(arena.allocate(8 * kMiB));  // free in the child
  std::memset(block, 5, 8 * kMiB);
  ASSERT_EQ(::write(ends[1], "g", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(block[4 * kMiB], 5);
  arena.free(block);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(Arena, StatsAndTrimArePublic) {
  install_arena();
  const std::uint64_t live_before = arena_stats().live_bytes;
  {
    const at::Tensor tensor = torch::ones({2 << 20});  // 8 MiB
    EXPECT_EQ(arena_stats().live_bytes, live_before + 8 * kMiB);
    EXPECT_GE(arena_stats().peak_live_bytes, 8 * kMiB);
    EXPECT_GE(arena_stats().high_water_bytes, 8 * kMiB);
  }
  uninstall_arena();
  EXPECT_EQ(arena_stats().live_bytes, live_before);
  const std::uint64_t resident = arena_stats().resident_bytes;
  const std::size_t trimmed = trim_arena();
  EXPECT_GE(trimmed, 8 * kMiB);
  EXPECT_EQ(arena_stats().resident_bytes, resident - trimmed);
}

}  // namespace
}  // namespace lockstep::comm::arena
