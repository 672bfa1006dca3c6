// Records which pages of the arena are in use. Works on page numbers and does not touch the memory of the arena.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::comm::arena {

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
  /// The free blocks as pairs of first page and length.
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
