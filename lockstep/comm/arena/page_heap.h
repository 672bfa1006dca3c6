// Which pages of the arena are in use. Numbers only: it touches no memory of the arena.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::comm {

/// Best fit with immediate merging (Knuth, TAOCP vol. 1, 2.5, with boundary tags, which lie here and not in the blocks:
/// a neighbour that writes where it should not cannot break them, and powers of two stay powers of two). One thread at
/// a time.
class PageHeap {
 public:
  explicit PageHeap(std::uint32_t num_pages);

  /// The first page of a block of `count`, the lowest of those that fit best; nothing when there is none.
  std::optional<std::uint32_t> allocate(std::uint32_t count);
  /// Takes back the block that begins at `page`. Returns its length.
  std::uint32_t free(std::uint32_t page);
  /// Length of the block in use that begins at `page`.
  std::uint32_t length(std::uint32_t page) const { return tags_[page] & ~kFreeFlag; }

  std::uint32_t num_pages() const { return num_pages_; }
  /// One past the last page that was ever in use.
  std::uint32_t high_water() const { return high_water_; }
  std::uint32_t in_use() const { return in_use_; }
  std::uint32_t peak_in_use() const { return peak_in_use_; }
  /// Free blocks, (first page, count).
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
  // On the first and the last page of each block: its length and whether it is free. Zeroed pages of the system, used
  // as needed.
  std::unique_ptr<std::uint32_t[], FreeDeleter> tags_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> free_;  // (count, first page)
  std::uint32_t high_water_ = 0;
  std::uint32_t in_use_ = 0;
  std::uint32_t peak_in_use_ = 0;
};

}  // namespace lockstep::comm
