#include "lockstep/comm/arena/page_heap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace lockstep::comm::arena {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(PageHeap, AllocatesBestFitLowestAddressFirst) {
  PageHeap heap(100);
  std::vector<std::uint32_t> pages;
  for (const std::uint32_t count : {10u, 1u, 4u, 1u, 4u, 1u}) pages.push_back(*heap.allocate(count));
  EXPECT_THAT(pages, ElementsAre(0, 10, 11, 15, 16, 20));
  heap.free(0);
  heap.free(16);
  heap.free(11);
  EXPECT_EQ(heap.allocate(3), 11u) << "4 pages fit 3 better than 10 or 79, and 11 is lower than 16";
  EXPECT_EQ(heap.allocate(11), 21u);
  EXPECT_EQ(heap.allocate(100), std::nullopt);
}

TEST(PageHeap, MergesWithBothAdjacentBlocks) {
  PageHeap heap(30);
  for (int i = 0; i < 3; ++i) heap.allocate(10);
  EXPECT_EQ(heap.allocate(1), std::nullopt);
  EXPECT_EQ(heap.free(0), 10u);
  EXPECT_EQ(heap.free(20), 10u);
  EXPECT_THAT(heap.free_blocks(), ElementsAre(Pair(0, 10), Pair(20, 10)));
  EXPECT_EQ(heap.free(10), 10u);
  EXPECT_THAT(heap.free_blocks(), ElementsAre(Pair(0, 30)));
  EXPECT_EQ(heap.in_use(), 0u);
  EXPECT_EQ(heap.peak_in_use(), 30u);
  EXPECT_EQ(heap.high_water(), 30u);
}

TEST(PageHeapDeathTest, DoubleFreeAborts) {
  PageHeap heap(10);
  heap.allocate(2);
  heap.allocate(2);
  heap.free(2);
  EXPECT_DEATH(heap.free(2), "check failed");
}

TEST(PageHeap, RandomBlocksNeverOverlapAndAreAllFreed) {
  constexpr std::uint32_t kPages = 5000;
  PageHeap heap(kPages);
  std::mt19937 random(7);
  std::map<std::uint32_t, std::uint32_t> held;
  for (int turn = 0; turn < 20000; ++turn) {
    if (held.empty() || random() % 100 < 52) {
      const std::uint32_t count = 1 + random() % 40;
      const auto page = heap.allocate(count);
      if (!page) continue;
      const auto next = held.upper_bound(*page);
      ASSERT_TRUE(next == held.end() || *page + count <= next->first);
      if (next != held.begin()) {
        const auto before = std::prev(next);
        ASSERT_LE(before->first + before->second, *page);
      }
      held[*page] = count;
    } else {
      const auto victim = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      ASSERT_EQ(heap.free(victim->first), victim->second);
      held.erase(victim);
    }
  }
  for (const auto& [page, count] : held) heap.free(page);
  EXPECT_THAT(heap.free_blocks(), ElementsAre(Pair(0, heap.high_water())));
  EXPECT_EQ(heap.allocate(kPages), 0u);
}

TEST(SizeClass, RoundsUpByAtMostAQuarter) {
  for (std::size_t size = 1; size <= kMaxSmallBytes; ++size) {
    const std::size_t index = size_class(size);
    ASSERT_GE(class_bytes(index), size);
    ASSERT_EQ(class_bytes(index) % kMinBlockBytes, 0u);
    ASSERT_TRUE(index == 0 || class_bytes(index - 1) < size);
    ASSERT_TRUE(size <= kMaxLinearBytes || class_bytes(index) * 4 <= size * 5 + 4);
  }
  EXPECT_EQ(class_bytes(kNumSizeClasses - 1), kMaxSmallBytes);
}

TEST(PageSet, CountsAcrossWords) {
  PageSet set(300);
  set.add(10, 200);
  EXPECT_EQ(set.count(0, 300), 200u);
  EXPECT_EQ(set.count(60, 10), 10u);
  EXPECT_EQ(set.count(0, 11), 1u);
  set.remove(64, 64);
  EXPECT_EQ(set.count(0, 300), 136u);
  EXPECT_EQ(set.count(64, 64), 0u);
  EXPECT_EQ(set.count(63, 66), 2u);
}

}  // namespace
}  // namespace lockstep::comm::arena
