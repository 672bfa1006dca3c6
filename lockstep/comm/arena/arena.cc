#include "lockstep/comm/arena/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/check.h"
#include "lockstep/base/host_memory.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/arena/memory_shortage.h"

namespace lockstep::comm::arena {

using base::memory_text;

namespace {

struct Capacity {
  std::size_t bytes = 0;
  std::string limit;  ///< "ulimit -v" or "ulimit -f" if that is the reason; else empty
};

constexpr std::uint64_t kMinCapacityBytes = 64ULL << 20;

/// Returns the smaller one, and logs the reason if that is `other`.
Capacity choose_smaller(Capacity capacity, Capacity other, const std::string& reason) {
  if (other.bytes >= capacity.bytes) return capacity;
  base::log_info(reason + ": the arena holds at most " + memory_text(other.bytes));
  return other;
}

/// Returns a quarter more than the physical memory, to allow for fragmentation, unless the process has a limit: then it
/// writes a line about it to the log. Batch systems such as PBS and SGE may limit the addresses of a process (ulimit
/// -v); half of those that are left are for the arenas of this host. The limit on file sizes (ulimit -f) also applies
/// to shared memory.
Capacity choose_capacity() {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t memory = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  Capacity capacity{memory + memory / 4, ""};
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    capacity = choose_smaller(std::move(capacity), {limit.rlim_cur / page * page, "ulimit -f"},
                              "the files of this rank are limited to " + memory_text(limit.rlim_cur) + " (ulimit -f)");
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return capacity;
  std::uint64_t used_pages = 0;
  std::ifstream("/proc/self/statm") >> used_pages;
  const std::uint64_t used = used_pages * page;
  const std::uint64_t left = limit.rlim_cur > used ? limit.rlim_cur - used : 0;
  return choose_smaller(std::move(capacity), {std::max(left / 2 / ranks_on_host(), kMinCapacityBytes), "ulimit -v"},
                        "the address space of this rank is limited to " + memory_text(limit.rlim_cur) +
                            " (ulimit -v), of which " + memory_text(used) + " are used");
}

constexpr std::size_t kPageBytes = 4096;
// A slab has at least this many bytes and at least this many blocks.
constexpr std::size_t kMinSlabBytes = 64 << 10;
constexpr std::size_t kMinSlabBlocks = 8;
// Core dumps contain the pages that are in use. The range grows in steps, because each is a system call, and a trimmed
// block is taken out only if it is large, because each doubles the number of the process's mappings there.
constexpr std::uint32_t kDumpedStepPages = (4 << 20) / kPageBytes;
constexpr std::uint32_t kMinUndumpedPages = (1 << 20) / kPageBytes;

/// Zeroed memory of which only the pages that are touched exist, and which core dumps do not contain.
void* reserve_zeroed(std::size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw ArenaFull("arena: no memory for a table of " + memory_text(bytes) + ": " + std::strerror(errno));
  ::madvise(memory, bytes, MADV_DONTDUMP);
#ifdef __SANITIZE_ADDRESS__
  __lsan_register_root_region(memory, bytes);  // the leak check does not search mapped memory by itself
#endif
  return memory;
}

}  // namespace

/// A range of pages that holds blocks of one size class.
struct Arena::Slab {
  char* begin = nullptr;
  std::uint32_t page = 0;
  std::uint32_t num_pages = 0;
  std::uint32_t index = 0;  // of its size class
  std::uint32_t block_bytes = 0;
  std::uint32_t num_blocks = 0;
  std::vector<std::uint16_t> free;  // a stack of the numbers of the free blocks
  std::size_t partial_index = 0;    // position in SizeClass::partial while the slab has free blocks
};

struct Arena::SizeClass {
  std::mutex mutex;            // guards `partial` and the slabs of the class
  std::vector<Slab*> partial;  // the slabs with free blocks
};

Arena::Arena(std::size_t capacity_bytes, std::size_t limit_bytes, const std::string& capacity_limit)
    : memory_(
          base::SharedMemory::create("lockstep-arena", (capacity_bytes + kPageBytes - 1) / kPageBytes * kPageBytes)),
      limit_bytes_(limit_bytes),
      kept_free_bytes_(bytes_kept_free()),
      capacity_limit_(capacity_limit),
      classes_(new SizeClass[kNumSizeClasses]),
      slab_of_page_(static_cast<Slab**>(reserve_zeroed(memory_.size() / kPageBytes * sizeof(Slab*))),
                    UnmapSlabTable{memory_.size() / kPageBytes * sizeof(Slab*)}),
      pages_(static_cast<std::uint32_t>(memory_.size() / kPageBytes)),
      resident_(static_cast<std::uint32_t>(memory_.size() / kPageBytes)) {
  LOCKSTEP_CHECK(memory_.size() / kPageBytes < (std::size_t{1} << 31));
}

void Arena::UnmapSlabTable::operator()(Slab** table) const {
#ifdef __SANITIZE_ADDRESS__
  __lsan_unregister_root_region(table, bytes);
#endif
  ::munmap(table, bytes);
}

Arena::~Arena() {
  Slab* last = nullptr;
  for (std::uint32_t page = 0; page < pages_.high_water(); ++page) {
    if (slab_of_page_[page] && slab_of_page_[page] != last) delete last;
    if (slab_of_page_[page]) last = slab_of_page_[page];
  }
  delete last;
}

char* Arena::page_address(std::uint32_t page) const { return memory_.data() + page * kPageBytes; }
std::uint32_t Arena::page_of(const void* address) const {
  return static_cast<std::uint32_t>(offset_of(address) / kPageBytes);
}

void* Arena::allocate(std::size_t size) {
  if (size == 0) return nullptr;
  if (size <= kMaxSmallBytes) return allocate_small(size_class(size));
  if (size > memory_.size())
    throw capacity_error("a block of " + memory_text(size) + " exceeds the arena's " + memory_text(memory_.size()));
  return allocate_pages(static_cast<std::uint32_t>((size + kPageBytes - 1) / kPageBytes));
}

void Arena::free(void* block) noexcept {
  if (!block) return;
  LOCKSTEP_CHECK(contains(block));
  const std::uint32_t page = page_of(block);
  if (Slab* slab = slab_of_page_[page]) return free_small(*slab, block);
  const std::lock_guard lock(pages_mutex_);
  pages_.free(page);
  publish_stats();
}

void* Arena::allocate_pages(std::uint32_t count) {
  const std::lock_guard lock(pages_mutex_);
  const auto page = pages_.allocate(count);
  if (!page)
    throw capacity_error("no contiguous " + memory_text(count * kPageBytes) + " in the arena's " +
                         memory_text(memory_.size()) + ", of which " + memory_text(pages_.in_use() * kPageBytes) +
                         " are in use");
  try {
    make_resident(*page, count);
  } catch (...) {
    pages_.free(*page);
    trim_locked();  // pieces that were obtained before the error
    throw;
  }
  publish_stats();
  return page_address(*page);
}

void* Arena::allocate_small(std::size_t index) {
  SizeClass& size_class = classes_[index];
  const std::lock_guard lock(size_class.mutex);
  Slab& slab = size_class.partial.empty() ? new_slab(index) : *size_class.partial.back();
  const std::size_t number = slab.free.back();
  slab.free.pop_back();
  if (slab.free.empty()) {
    size_class.partial[slab.partial_index] = size_class.partial.back();
    size_class.partial[slab.partial_index]->partial_index = slab.partial_index;
    size_class.partial.pop_back();
  }
  return slab.begin + number * slab.block_bytes;
}

void Arena::free_small(Slab& slab, void* block) noexcept {
  SizeClass& size_class = classes_[slab.index];
  const std::lock_guard lock(size_class.mutex);
  const auto offset = static_cast<std::size_t>(static_cast<char*>(block) - slab.begin);
  LOCKSTEP_CHECK(offset % slab.block_bytes == 0 && slab.free.size() < slab.num_blocks);
  slab.free.push_back(static_cast<std::uint16_t>(offset / slab.block_bytes));
  if (slab.free.size() == 1) {
    slab.partial_index = size_class.partial.size();
    size_class.partial.push_back(&slab);
  }
  // An empty slab is kept if no other slab of the class has free blocks. Otherwise a block that is allocated and freed
  // in turn would create and release a slab each time.
  if (slab.free.size() == slab.num_blocks && size_class.partial.size() > 1) release_slab(slab);
}

Arena::Slab& Arena::new_slab(std::size_t index) {
  auto slab = std::make_unique<Slab>();
  slab->index = static_cast<std::uint32_t>(index);
  slab->block_bytes = static_cast<std::uint32_t>(class_bytes(index));
  const std::size_t bytes = std::max(kMinSlabBytes, kMinSlabBlocks * slab->block_bytes);
  slab->num_pages = static_cast<std::uint32_t>((bytes + kPageBytes - 1) / kPageBytes);
  slab->num_blocks = static_cast<std::uint32_t>(slab->num_pages * kPageBytes / slab->block_bytes);
  slab->free.reserve(slab->num_blocks);
  for (std::uint32_t number = slab->num_blocks; number-- > 0;) slab->free.push_back(static_cast<std::uint16_t>(number));
  SizeClass& size_class = classes_[index];
  size_class.partial.reserve(size_class.partial.size() + 1);
  slab->begin = static_cast<char*>(allocate_pages(slab->num_pages));
  slab->page = page_of(slab->begin);
  for (std::uint32_t i = 0; i < slab->num_pages; ++i) slab_of_page_[slab->page + i] = slab.get();
  slab->partial_index = size_class.partial.size();
  size_class.partial.push_back(slab.get());
  const std::lock_guard lock(pages_mutex_);
  slab_pages_ += slab->num_pages;
  return *slab.release();
}

void Arena::release_slab(Slab& slab) noexcept {
  SizeClass& size_class = classes_[slab.index];
  size_class.partial[slab.partial_index] = size_class.partial.back();
  size_class.partial[slab.partial_index]->partial_index = slab.partial_index;
  size_class.partial.pop_back();
  for (std::uint32_t i = 0; i < slab.num_pages; ++i) slab_of_page_[slab.page + i] = nullptr;
  {
    const std::lock_guard lock(pages_mutex_);
    slab_pages_ -= slab.num_pages;
    pages_.free(slab.page);
    publish_stats();
  }
  delete &slab;
}

// The caller of the next five functions holds pages_mutex_.

void Arena::make_resident(std::uint32_t page, std::uint32_t count) {
  const std::uint64_t bytes = (count - resident_.count(page, count)) * kPageBytes;
  if (bytes == 0) return;
  if (resident_pages_ * kPageBytes + bytes > limit_bytes_) trim_locked();
  if (resident_pages_ * kPageBytes + bytes > limit_bytes_)
    throw ArenaFull("arena: " + memory_text(bytes) + " more would exceed its limit of " + memory_text(limit_bytes_) +
                    "; " + memory_text(resident_pages_ * kPageBytes) + " are in use");
  if (bytes > kPieceBytes) read_available(bytes, bytes);  // before a part of it is obtained
  include_in_dumps(page, count);
  constexpr std::uint32_t kPiecePages = kPieceBytes / kPageBytes;
  for (std::uint32_t done = 0; done < count; done += kPiecePages)
    obtain_pages(page + done, std::min(kPiecePages, count - done), bytes);
}

void Arena::obtain_pages(std::uint32_t page, std::uint32_t count, std::uint64_t bytes_of_block) {
  const std::uint64_t nonresident = count - resident_.count(page, count);
  if (nonresident == 0) return;
  const std::uint64_t bytes = nonresident * kPageBytes;
  if (budget_bytes_ < bytes)
    budget_bytes_ = std::max(bytes, std::min(kPieceBytes, read_available(bytes, bytes_of_block)));
  budget_bytes_ -= bytes;
  int error = 0;
  if (!is_copy_)
    error = memory_.reserve(page * kPageBytes, count * kPageBytes);
  else if (::mprotect(page_address(page), count * kPageBytes, PROT_READ | PROT_WRITE) != 0)
    error = errno;  // memory that was not in use at the fork may be reserved only
  if (error != 0) throw_shortage(bytes_of_block, base::HostMemory::now(), error);
  resident_.add(page, count);
  resident_pages_ += nonresident;
}

/// Call it before the pages become resident.
void Arena::include_in_dumps(std::uint32_t page, std::uint32_t count) {
  const auto include = [&](std::uint32_t begin, std::uint32_t end) {
    memory_.set_dumped(begin * kPageBytes, (end - begin) * kPageBytes, true);
  };
  const std::uint32_t end = page + count;
  if (page < dumped_end_) include(page, std::min(end, dumped_end_));  // pages that were trimmed
  if (end <= dumped_end_) return;
  const auto all = static_cast<std::uint32_t>(memory_.size() / kPageBytes);
  const std::uint32_t new_end = std::min(all, (end + kDumpedStepPages - 1) / kDumpedStepPages * kDumpedStepPages);
  include(dumped_end_, new_end);
  dumped_end_ = new_end;
}

/// Returns how many bytes may become resident. Throws ArenaFull if these are less than `bytes`.
std::uint64_t Arena::read_available(std::uint64_t bytes, std::uint64_t bytes_of_block) {
  base::HostMemory host = base::HostMemory::now();
  if (host.available_bytes < bytes + kept_free_bytes_ && trim_locked() > 0) host = base::HostMemory::now();
  if (host.available_bytes < bytes + kept_free_bytes_) throw_shortage(bytes_of_block, host, 0);
  return host.available_bytes - kept_free_bytes_;
}

/// `text` names the block and the size of the arena.
ArenaFull Arena::capacity_error(const std::string& text) const {
  if (capacity_limit_.empty()) return ArenaFull("arena: " + text, "use a smaller model or a smaller batch");
  return ArenaFull("arena: " + text + "; " + capacity_limit_ + " limits the arena",
                   "raise " + capacity_limit_ + ", or use fewer ranks on this host");
}

void Arena::throw_shortage(std::uint64_t bytes, const base::HostMemory& host, int error_number) const {
  const MemoryShortage shortage = examine_shortage(bytes, host, error_number, resident_pages_ * kPageBytes);
  throw ArenaFull("arena: " + describe(shortage), remedy(shortage));
}

std::size_t Arena::trim_locked() {
  if (is_copy_) return 0;
  std::uint64_t pages = 0;
  for (const auto& [page, count] : pages_.free_blocks()) {
    const std::uint64_t resident = resident_.count(page, count);
    if (resident == 0) continue;
    if (::fallocate(memory_.fd().get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(page * kPageBytes), static_cast<off_t>(count * kPageBytes)) != 0)
      continue;
    if (count >= kMinUndumpedPages) memory_.set_dumped(page * kPageBytes, count * kPageBytes, false);
    resident_.remove(page, count);
    pages += resident;
  }
  resident_pages_ -= pages;
  publish_stats();
  return pages * kPageBytes;
}

/// The caller holds pages_mutex_.
void Arena::publish_stats() noexcept {
  if (!published_) return;
  published_->live.store(pages_.in_use() * kPageBytes, std::memory_order_relaxed);
  published_->peak_live.store(pages_.peak_in_use() * kPageBytes, std::memory_order_relaxed);
  published_->high_water.store(pages_.high_water() * kPageBytes, std::memory_order_relaxed);
  published_->resident.store(resident_pages_ * kPageBytes, std::memory_order_relaxed);
}

void Arena::publish_stats_to(base::telemetry::ArenaCounters& counters) {
  const std::lock_guard lock(pages_mutex_);
  published_ = &counters;
  publish_stats();
}

std::size_t Arena::trim() {
  const std::lock_guard lock(pages_mutex_);
  return trim_locked();
}

ArenaStats Arena::stats() const {
  const std::lock_guard lock(pages_mutex_);
  return {.live_bytes = pages_.in_use() * kPageBytes,
          .peak_live_bytes = pages_.peak_in_use() * kPageBytes,
          .high_water_bytes = pages_.high_water() * kPageBytes,
          .resident_bytes = resident_pages_ * kPageBytes,
          .slab_bytes = slab_pages_ * kPageBytes};
}

void Arena::lock_all() {
  for (std::size_t i = 0; i < kNumSizeClasses; ++i) classes_[i].mutex.lock();
  pages_mutex_.lock();
}

void Arena::unlock_all() {
  pages_mutex_.unlock();
  for (std::size_t i = kNumSizeClasses; i-- > 0;) classes_[i].mutex.unlock();
}

/// Called between lock_all() and unlock_all().
std::vector<ForkCopied::Range> Arena::used_ranges() const {
  auto free = pages_.free_blocks();
  std::sort(free.begin(), free.end());
  free.emplace_back(pages_.high_water(), 0);
  std::vector<ForkCopied::Range> used;
  std::uint32_t begin = 0;
  for (const auto& [page, count] : free) {
    if (begin < page) used.push_back({begin * kPageBytes, page * kPageBytes});
    begin = page + count;
  }
  return used;
}

void Arena::become_copy() {
  published_ = nullptr;  // belongs to the parent
  is_copy_ = true;
  for (const auto& [page, count] : pages_.free_blocks()) {
    resident_pages_ -= resident_.count(page, count);
    resident_.remove(page, count);
  }
  unlock_all();
}

Arena& Arena::this_process() {
  static Arena* const arena = [] {
    const Capacity capacity = choose_capacity();
    auto* created = new Arena(capacity.bytes, std::numeric_limits<std::size_t>::max(), capacity.limit);
    created->publish_stats_to(base::telemetry::RankPage::this_process().arena);
    created->fork_copied_.emplace(created->memory_.data(), created->memory_.size(),
                                  [created] { return created->used_ranges(); });
    // Registered later than the handlers of ForkCopied, so that they run while all is locked.
    ::pthread_atfork([] { this_process().lock_all(); }, [] { this_process().unlock_all(); },
                     [] { this_process().become_copy(); });
    return created;
  }();
  return *arena;
}

ArenaStats arena_stats() { return Arena::this_process().stats(); }

std::size_t trim_arena() { return Arena::this_process().trim(); }

}  // namespace lockstep::comm::arena
