#include "lockstep/comm/arena/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/base/check.h"
#include "lockstep/base/host_memory.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSlabBytes = 64 << 10;  // at least, and at least kSlabBlocks blocks
constexpr std::size_t kSlabBlocks = 8;
constexpr std::uint64_t kGrant = 64ULL << 20;    // the host is asked once for so much: 50 us for each would be felt
constexpr std::uint64_t kReserve = 64ULL << 20;  // left to everybody else

std::string mib(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

/// Pages that hold blocks of one size. The numbers of the free blocks are a stack.
struct Arena::Slab {
  char* begin = nullptr;
  std::uint32_t page = 0;
  std::uint32_t num_pages = 0;
  std::uint32_t index = 0;  // of its class
  std::uint32_t block_bytes = 0;
  std::uint32_t num_blocks = 0;
  std::vector<std::uint16_t> free;
  std::size_t place = 0;  // in Class::partial, while it has free blocks
};

struct Arena::Class {
  std::mutex mutex;  // guards what follows and the slabs of the class
  std::vector<Slab*> partial;
};

Arena::Arena(std::size_t capacity_bytes, std::size_t limit_bytes)
    : memory_(base::SharedMemory::create("lockstep-arena", (capacity_bytes + kPage - 1) / kPage * kPage)),
      limit_bytes_(limit_bytes),
      classes_(new Class[kNumClasses]),
      slab_of_page_(static_cast<Slab**>(std::calloc(memory_.size() / kPage, sizeof(Slab*))),
                    [](Slab** p) { std::free(p); }),
      pages_(static_cast<std::uint32_t>(memory_.size() / kPage)),
      resident_(static_cast<std::uint32_t>(memory_.size() / kPage)) {
  if (!slab_of_page_) throw std::bad_alloc();
  LOCKSTEP_CHECK(memory_.size() / kPage < (std::size_t{1} << 31));
}

Arena::~Arena() {
  Slab* last = nullptr;
  for (std::uint32_t page = 0; page < pages_.high_water(); ++page) {
    if (slab_of_page_[page] && slab_of_page_[page] != last) delete last;
    if (slab_of_page_[page]) last = slab_of_page_[page];
  }
  delete last;
}

char* Arena::page_address(std::uint32_t page) const { return memory_.data() + page * kPage; }
std::uint32_t Arena::page_of(const void* address) const {
  return static_cast<std::uint32_t>(offset_of(address) / kPage);
}

void* Arena::allocate(std::size_t size) {
  if (size == 0) return nullptr;
  if (size <= kLargestSmall) return allocate_small(size_class(size));
  if (size > memory_.size())
    throw ArenaFull("arena: a block of " + mib(size) + " does not fit into the arena's " + mib(memory_.size()));
  return allocate_pages(static_cast<std::uint32_t>((size + kPage - 1) / kPage));
}

void Arena::free(void* block) noexcept {
  if (!block) return;
  LOCKSTEP_CHECK(contains(block));
  const std::uint32_t page = page_of(block);
  if (Slab* slab = slab_of_page_[page]) return free_small(*slab, block);
  const std::lock_guard lock(pages_mutex_);
  pages_.give(page);
  show();
}

void* Arena::allocate_pages(std::uint32_t count) {
  const std::lock_guard lock(pages_mutex_);
  const auto page = pages_.take(count);
  if (!page)
    throw ArenaFull("arena: no " + mib(count * kPage) + " in one piece among the arena's " + mib(memory_.size()) +
                    ", of which " + mib(pages_.in_use() * kPage) + " are in use");
  try {
    make_resident(*page, count);
  } catch (...) {
    pages_.give(*page);
    throw;
  }
  show();
  return page_address(*page);
}

void* Arena::allocate_small(std::size_t index) {
  Class& of_size = classes_[index];
  const std::lock_guard lock(of_size.mutex);
  Slab& slab = of_size.partial.empty() ? new_slab(index) : *of_size.partial.back();
  const std::size_t number = slab.free.back();
  slab.free.pop_back();
  if (slab.free.empty()) {
    of_size.partial[slab.place] = of_size.partial.back();
    of_size.partial[slab.place]->place = slab.place;
    of_size.partial.pop_back();
  }
  return slab.begin + number * slab.block_bytes;
}

void Arena::free_small(Slab& slab, void* block) noexcept {
  Class& of_size = classes_[slab.index];
  const std::lock_guard lock(of_size.mutex);
  const auto offset = static_cast<std::size_t>(static_cast<char*>(block) - slab.begin);
  LOCKSTEP_CHECK(offset % slab.block_bytes == 0 && slab.free.size() < slab.num_blocks);
  slab.free.push_back(static_cast<std::uint16_t>(offset / slab.block_bytes));
  if (slab.free.size() == 1) {
    slab.place = of_size.partial.size();
    of_size.partial.push_back(&slab);
  }
  // One empty slab stays, or a block that comes and goes would make and release it each time.
  if (slab.free.size() == slab.num_blocks && of_size.partial.size() > 1) release_slab(slab);
}

Arena::Slab& Arena::new_slab(std::size_t index) {
  auto slab = std::make_unique<Slab>();
  slab->index = static_cast<std::uint32_t>(index);
  slab->block_bytes = static_cast<std::uint32_t>(class_bytes(index));
  const std::size_t bytes = std::max(kSlabBytes, kSlabBlocks * slab->block_bytes);
  slab->num_pages = static_cast<std::uint32_t>((bytes + kPage - 1) / kPage);
  slab->num_blocks = static_cast<std::uint32_t>(slab->num_pages * kPage / slab->block_bytes);
  slab->free.reserve(slab->num_blocks);
  for (std::uint32_t number = slab->num_blocks; number-- > 0;) slab->free.push_back(static_cast<std::uint16_t>(number));
  Class& of_size = classes_[index];
  of_size.partial.reserve(of_size.partial.size() + 1);
  slab->begin = static_cast<char*>(allocate_pages(slab->num_pages));
  slab->page = page_of(slab->begin);
  for (std::uint32_t i = 0; i < slab->num_pages; ++i) slab_of_page_[slab->page + i] = slab.get();
  slab->place = of_size.partial.size();
  of_size.partial.push_back(slab.get());
  const std::lock_guard lock(pages_mutex_);
  slab_pages_ += slab->num_pages;
  return *slab.release();
}

void Arena::release_slab(Slab& slab) noexcept {
  Class& of_size = classes_[slab.index];
  of_size.partial[slab.place] = of_size.partial.back();
  of_size.partial[slab.place]->place = slab.place;
  of_size.partial.pop_back();
  for (std::uint32_t i = 0; i < slab.num_pages; ++i) slab_of_page_[slab.page + i] = nullptr;
  {
    const std::lock_guard lock(pages_mutex_);
    slab_pages_ -= slab.num_pages;
    pages_.give(slab.page);
    show();
  }
  delete &slab;
}

// Everything below holds pages_mutex_.

void Arena::make_resident(std::uint32_t page, std::uint32_t count) {
  const std::uint64_t cold = count - resident_.count(page, count);
  if (cold == 0) return;
  reserve(cold * kPage);
  resident_.add(page, count);
  resident_pages_ += cold;
}

void Arena::reserve(std::uint64_t bytes) {
  if (resident_pages_ * kPage + bytes > limit_bytes_) trim_locked();
  if (resident_pages_ * kPage + bytes > limit_bytes_)
    throw ArenaFull("arena: " + mib(bytes) + " more would pass its limit of " + mib(limit_bytes_) + "; " +
                    mib(resident_pages_ * kPage) + " are in use");
  if (granted_bytes_ < bytes) {
    base::HostMemory host = base::HostMemory::now();
    if (host.available_bytes < bytes + kReserve && trim_locked() > 0) host = base::HostMemory::now();
    if (host.available_bytes < bytes + kReserve)
      throw ArenaFull("arena: no memory for " + mib(bytes) + " more: " + host.limited_by + " has " +
                      mib(host.available_bytes) + " left; this process holds " + mib(resident_pages_ * kPage));
    granted_bytes_ = bytes + std::min(kGrant, host.available_bytes - bytes - kReserve);
  }
  granted_bytes_ -= bytes;
}

std::size_t Arena::trim_locked() {
  std::uint64_t pages = 0;
  for (const auto& [page, count] : pages_.free_blocks()) {
    const std::uint32_t end = std::min(page + count, pages_.high_water());
    if (end <= page) continue;
    const std::uint64_t warm = resident_.count(page, end - page);
    if (warm == 0) continue;
    const auto offset = static_cast<off_t>(page * kPage);
    if (::fallocate(memory_.fd().get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                    static_cast<off_t>((end - page) * kPage)) != 0)
      continue;
    resident_.remove(page, end - page);
    pages += warm;
  }
  resident_pages_ -= pages;
  show();
  return pages * kPage;
}

void Arena::show() noexcept {
  if (!shown_) return;
  shown_->live.store(pages_.in_use() * kPage, std::memory_order_relaxed);
  shown_->peak_live.store(pages_.peak_in_use() * kPage, std::memory_order_relaxed);
  shown_->high_water.store(pages_.high_water() * kPage, std::memory_order_relaxed);
  shown_->resident.store(resident_pages_ * kPage, std::memory_order_relaxed);
}

void Arena::show_in(base::ArenaNumbers& numbers) {
  const std::lock_guard lock(pages_mutex_);
  shown_ = &numbers;
  show();
}

std::size_t Arena::trim() {
  const std::lock_guard lock(pages_mutex_);
  return trim_locked();
}

ArenaStats Arena::stats() const {
  const std::lock_guard lock(pages_mutex_);
  return {.live_bytes = pages_.in_use() * kPage,
          .peak_live_bytes = pages_.peak_in_use() * kPage,
          .high_water_bytes = pages_.high_water() * kPage,
          .resident_bytes = resident_pages_ * kPage,
          .slab_bytes = slab_pages_ * kPage};
}

void Arena::lock_all() {
  for (std::size_t i = 0; i < kNumClasses; ++i) classes_[i].mutex.lock();
  pages_mutex_.lock();
}

void Arena::unlock_all() {
  pages_mutex_.unlock();
  for (std::size_t i = kNumClasses; i-- > 0;) classes_[i].mutex.unlock();
}

void Arena::become_private() {
  // The mapping was not inherited (MADV_DONTFORK): at the same addresses comes one whose changes stay here.
  shown_ = nullptr;  // it is the parent's
  ::mmap(memory_.data(), memory_.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
         memory_.fd().get(), 0);
  unlock_all();
}

Arena& Arena::process() {
  static Arena* const arena = [] {
    // A quarter more addresses than memory: what fragments need.
    const auto memory =
        static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    auto* made = new Arena(memory + memory / 4, std::numeric_limits<std::size_t>::max());
    made->show_in(base::RankPage::process().arena);
    ::pthread_atfork([] { process().lock_all(); }, [] { process().unlock_all(); }, [] { process().become_private(); });
    return made;
  }();
  return *arena;
}

ArenaStats arena_stats() { return Arena::process().stats(); }

std::size_t trim_arena() { return Arena::process().trim(); }

}  // namespace lockstep::comm
