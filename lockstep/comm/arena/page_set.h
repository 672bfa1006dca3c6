// A set of page numbers with operations on ranges of pages.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace lockstep::comm::arena {

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

}  // namespace lockstep::comm::arena
