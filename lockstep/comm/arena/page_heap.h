// Records which pages of the arena are in use. Works on page numbers and does not touch the memory of the arena.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::comm::arena {

// The smallest block, and the alignment of all blocks: the size of a cache line, and libtorch's own alignment.
constexpr std::size_t kMinBlockBytes = 64;
// The largest small block. Larger blocks consist of whole pages.
constexpr std::size_t kMaxSmallBytes = 64 << 10;
// Up to this size every multiple of kMinBlockBytes is a class; beyond it there are four classes per doubling.
constexpr std::size_t kMaxLinearBytes = 1024;

/// The index of the class for blocks of `size` bytes, which is in 1..kMaxSmallBytes.
constexpr std::size_t size_class(std::size_t size) {
  if (size <= kMaxLinearBytes) return (size - 1) / kMinBlockBytes;
  const auto doubling =
      static_cast<std::size_t>(std::bit_width(size - 1)) - 1;  // 2^doubling < size <= 2^(doubling + 1)
  return kMaxLinearBytes / kMinBlockBytes + (doubling - 10) * 4 + (((size - 1) >> (doubling - 2)) & 3);
}

/// The number of bytes of a block of class `index`.
constexpr std::size_t class_bytes(std::size_t index) {
  if (index < kMaxLinearBytes / kMinBlockBytes) return (index + 1) * kMinBlockBytes;
  const std::size_t step = index - kMaxLinearBytes / kMinBlockBytes;
  return (std::size_t{1024} << (step / 4)) / 4 * (5 + step % 4);
}

constexpr std::size_t kNumSizeClasses = size_class(kMaxSmallBytes) + 1;

/// A bit map. Not thread-safe.
class PageSet {
 public:
  explicit PageSet(std::uint32_t num_pages) : words_((num_pages + 63) / 64) {}

  /// The number of pages in [first, first + count) that are in the set.
  std::uint64_t count(std::uint32_t first, std::uint32_t count) const {
    std::uint64_t found = 0;
    for_each_word(first, count, [&](std::size_t word, std::uint64_t mask) {
      found += static_cast<std::uint64_t>(std::popcount(words_[word] & mask));
    });
    return found;
  }
  void add(std::uint32_t first, std::uint32_t count) {
    for_each_word(first, count, [&](std::size_t word, std::uint64_t mask) { words_[word] |= mask; });
  }
  void remove(std::uint32_t first, std::uint32_t count) {
    for_each_word(first, count, [&](std::size_t word, std::uint64_t mask) { words_[word] &= ~mask; });
  }

 private:
  template <typename F>
  static void for_each_word(std::uint32_t first, std::uint32_t count, F&& f) {
    for (std::uint64_t page = first, end = std::uint64_t{first} + count; page < end;) {
      const std::uint64_t low = page % 64;
      const std::uint64_t taken = std::min<std::uint64_t>(64 - low, end - page);
      f(page / 64, (taken == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << taken) - 1) << low);
      page += taken;
    }
  }

  std::vector<std::uint64_t> words_;
};

/// A best-fit allocator with immediate merging and boundary tags (Knuth, TAOCP vol. 1, 2.5). The tags are stored in
/// this object and not in the blocks: a peer that writes out of bounds cannot damage them, and a block of 2^n bytes
/// takes exactly 2^n bytes. Not thread-safe.
class PageHeap {
 public:
  explicit PageHeap(std::uint32_t num_pages);

  /// Allocates `count` pages from the smallest free block that is large enough, and from the lowest one among equals.
  /// Returns the first page, or nullopt if no free block is large enough.
  std::optional<std::uint32_t> allocate(std::uint32_t count);
  /// Frees the block that begins at `page` and returns its length in pages. Aborts if no block in use begins there.
  std::uint32_t free(std::uint32_t page);
  /// One past the highest page that has ever been in use.
  std::uint32_t high_water() const { return high_water_; }
  std::uint32_t in_use() const { return in_use_; }
  std::uint32_t peak_in_use() const { return peak_in_use_; }
  /// The free blocks, and parts of blocks, below high_water(), as pairs of first page and length.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> free_blocks() const;

 private:
  static constexpr std::uint32_t kFreeFlag = 1U << 31;
  struct FreeDeleter {
    void operator()(std::uint32_t* tags) const { std::free(tags); }
  };
  void set_tags(std::uint32_t page, std::uint32_t count, std::uint32_t flag);
  void add_free(std::uint32_t page, std::uint32_t count);
  void remove_free(std::uint32_t page, std::uint32_t count);

  const std::uint32_t num_pages_;
  // The entries of the first and the last page of a block hold its length and whether it is free. From calloc(), so the
  // kernel provides memory only for the entries that are used.
  std::unique_ptr<std::uint32_t[], FreeDeleter> tags_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> free_;  // (count, first page)
  std::uint32_t high_water_ = 0;
  std::uint32_t in_use_ = 0;
  std::uint32_t peak_in_use_ = 0;
};

}  // namespace lockstep::comm::arena
