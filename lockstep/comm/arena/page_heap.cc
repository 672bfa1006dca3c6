#include "lockstep/comm/arena/page_heap.h"

#include <algorithm>
#include <new>

#include "lockstep/base/check.h"

namespace lockstep::comm::arena {

PageHeap::PageHeap(std::uint32_t num_pages)
    : num_pages_(num_pages), tags_(static_cast<std::uint32_t*>(std::calloc(num_pages, sizeof(std::uint32_t)))) {
  if (!tags_) throw std::bad_alloc();
  add_free(0, num_pages);
}

void PageHeap::set_tags(std::uint32_t page, std::uint32_t count, std::uint32_t flag) {
  tags_[page] = tags_[page + count - 1] = count | flag;
}

void PageHeap::add_free(std::uint32_t page, std::uint32_t count) {
  set_tags(page, count, kFreeFlag);
  free_.emplace(count, page);
}

void PageHeap::remove_free(std::uint32_t page, std::uint32_t count) { free_.erase({count, page}); }

std::optional<std::uint32_t> PageHeap::allocate(std::uint32_t count) {
  const auto found = free_.lower_bound({count, 0});
  if (found == free_.end()) return std::nullopt;
  const auto [size, page] = *found;
  free_.erase(found);
  if (size > count) add_free(page + count, size - count);
  set_tags(page, count, 0);
  high_water_ = std::max(high_water_, page + count);
  in_use_ += count;
  peak_in_use_ = std::max(peak_in_use_, in_use_);
  return page;
}

std::uint32_t PageHeap::free(std::uint32_t page) {
  const std::uint32_t count = tags_[page];
  LOCKSTEP_CHECK(count > 0 && (count & kFreeFlag) == 0);
  in_use_ -= count;
  std::uint32_t first = page;
  std::uint32_t end = page + count;
  if (first > 0 && (tags_[first - 1] & kFreeFlag) != 0) {
    const std::uint32_t before = tags_[first - 1] & ~kFreeFlag;
    remove_free(first - before, before);
    first -= before;
  }
  if (end < num_pages_ && (tags_[end] & kFreeFlag) != 0) {
    const std::uint32_t after = tags_[end] & ~kFreeFlag;
    remove_free(end, after);
    end += after;
  }
  tags_[page] = 0;  // so that the check above detects a double free
  add_free(first, end - first);
  return count;
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> PageHeap::free_blocks() const {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> blocks;
  for (const auto& [count, page] : free_)
    if (page < high_water_) blocks.emplace_back(page, std::min(count, high_water_ - page));
  return blocks;
}

}  // namespace lockstep::comm::arena
