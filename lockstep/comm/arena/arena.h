// An allocator over memory that the ranks of this host can read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/arena/page_heap.h"
#include "lockstep/comm/arena/page_set.h"
#include "lockstep/comm/arena/size_class.h"

namespace lockstep::comm {

/// No memory left: of the host, the control group, or the arena's limit. what() names which, and the sizes.
class ArenaFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Small blocks (up to 64 KiB) come from slabs of one size class, larger ones from a best-fit heap of pages. Freed
/// memory stays with the process until trim(). Any thread. What describes the blocks lies outside the shared memory.
class Arena {
 public:
  /// `capacity_bytes` bounds addresses, not memory: pages come when they are touched. More than `limit_bytes` resident
  /// is refused.
  Arena(std::size_t capacity_bytes, std::size_t limit_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Aligned to 64 bytes, contents unspecified; null for 0. Throws ArenaFull.
  void* allocate(std::size_t size);
  /// Gives back what allocate() returned.
  void free(void* block) noexcept;
  bool contains(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - memory_.data()) < memory_.size();
  }
  /// Where `address` lies, for neighbours that map the same memory elsewhere.
  std::uint64_t offset_of(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const char*>(address) - memory_.data());
  }

  /// Gives the pages of free blocks back to the system. Returns how many bytes those were.
  std::size_t trim();
  ArenaStats stats() const;
  const base::SharedMemory& memory() const { return memory_; }
  /// From now on keeps stats() up to date in `numbers` as well, which must live as long as this.
  void publish_stats_to(base::ArenaCounters& numbers);

  /// The arena of this process, made at the first call and never destroyed: tensors in static objects outlive main(). A
  /// child made by fork() keeps what it sees of it, copied as it writes: nothing that it does reaches this process or
  /// its neighbours.
  static Arena& this_process();

 private:
  struct Slab;
  struct SizeClass;
  void* allocate_small(std::size_t index);
  void free_small(Slab& slab, void* block) noexcept;
  void* allocate_pages(std::uint32_t count);
  Slab& new_slab(std::size_t index);
  void release_slab(Slab& slab) noexcept;
  void make_resident(std::uint32_t page, std::uint32_t count);
  void reserve(std::uint64_t bytes);
  std::size_t trim_locked();
  void publish_stats() noexcept;
  char* page_address(std::uint32_t page) const;
  std::uint32_t page_of(const void* address) const;
  void lock_all();
  void unlock_all();
  void make_private_after_fork();

  base::SharedMemory memory_;
  const std::uint64_t limit_bytes_;
  std::unique_ptr<SizeClass[]> classes_;
  // The slab that a page belongs to, null for pages of large blocks. Written before the page's blocks are handed out.
  std::unique_ptr<Slab*[], void (*)(Slab**)> slab_of_page_;

  mutable std::mutex pages_mutex_;  // guards what follows; taken after a class's mutex
  PageHeap pages_;
  PageSet resident_;
  std::uint64_t resident_pages_ = 0;
  std::uint64_t budget_bytes_ = 0;  // that the host is known to have
  std::uint64_t slab_pages_ = 0;
  base::ArenaCounters* published_ = nullptr;
};

}  // namespace lockstep::comm
