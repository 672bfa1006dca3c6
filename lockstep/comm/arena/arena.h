// An allocator over shared memory that all ranks of this host can read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/arena/fork_copies.h"
#include "lockstep/comm/arena/memory_shortage.h"
#include "lockstep/comm/arena/page_heap.h"

namespace lockstep::comm::arena {

/// Allocates small blocks (up to 64 KiB) from slabs of one size class, and larger blocks from a best-fit heap of pages.
/// The process keeps freed memory until trim(), or until an allocation needs it. All data structures that describe the
/// blocks are outside the shared memory, so a peer cannot damage them.
///
/// Memory: allocate() obtains every page of a block from the kernel before it returns, unless it has it already. A
/// block that was returned can be written without SIGBUS, and lack of memory is an exception here instead of a signal
/// in the middle of a step. Pages belong to the NUMA node of the thread that calls allocate(). While it obtains pages,
/// allocate() leaves some memory free on the host and in the control group, enough for all ranks of the host to obtain
/// pages at the same time. What is not guaranteed: other processes, and allocations of this process outside the arena,
/// may use that rest at any time. The kernel's out-of-memory killer then ends a process; if that is a rank, the
/// launcher reports RANK_DIED with the kernel's count of such kills.
///
/// Threads: every member function may be called from any thread; mutexes guard the state.
///
/// Memory ordering: free() reads slab_of_page_ without a lock. allocate_small() writes the entries of a slab, with the
/// mutex of its size class held, before it returns the first block of that slab. So the write happens before any free()
/// of the block, provided that the caller passes the block between threads with the usual synchronization. An entry is
/// reset only when every block of the slab has been freed under the same mutex, so no free() can still read it. The
/// counters of publish_stats_to() are relaxed atomic stores: each value is whole, but two values may belong to
/// different moments. The arena publishes nothing to other processes; the structures of comm/shm do (see
/// control_block.h).
class Arena {
 public:
  /// Reserves `capacity_bytes` of addresses. allocate() throws ArenaFull if more than `limit_bytes` would become
  /// resident. `capacity_limit` is the name of the limit that set the capacity, for errors: "ulimit -v". Throws
  /// SystemError, or ArenaFull if the process has no memory for the arena's own tables.
  Arena(std::size_t capacity_bytes, std::size_t limit_bytes, const std::string& capacity_limit = {});
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Returns a block aligned to 64 bytes, with unspecified contents, or null if `size` is 0. Throws ArenaFull.
  void* allocate(std::size_t size);
  /// Frees a block that allocate() returned. Null is ignored. Aborts if `block` is not in the arena.
  void free(void* block) noexcept;
  bool contains(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - memory_.data()) < memory_.size();
  }
  /// The offset of `address` from the start of the arena, for peers that map the same memory at another address.
  std::uint64_t offset_of(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const char*>(address) - memory_.data());
  }

  /// Returns the pages of free blocks to the operating system. Returns the number of bytes.
  std::size_t trim();
  ArenaStats stats() const;
  const base::SharedMemory& memory() const { return memory_; }
  /// From now on, also writes the statistics to `counters`, which must outlive the arena.
  void publish_stats_to(base::telemetry::ArenaCounters& counters);

  /// Returns the arena of this process. The first call creates it; it is never destroyed, because tensors in static
  /// objects outlive main(). A child made by fork() gets a copy of the blocks in use: see ForkCopied.
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
  void include_in_dumps(std::uint32_t page, std::uint32_t count);
  void obtain_pages(std::uint32_t page, std::uint32_t count, std::uint64_t bytes_of_block);
  std::uint64_t read_available(std::uint64_t bytes, std::uint64_t bytes_of_block);
  ArenaFull capacity_error(const std::string& text) const;
  [[noreturn]] void throw_shortage(std::uint64_t bytes, const base::HostMemory& host, int error_number) const;
  std::size_t trim_locked();
  void publish_stats() noexcept;
  char* page_address(std::uint32_t page) const;
  std::uint32_t page_of(const void* address) const;
  void lock_all();
  void unlock_all();
  void become_copy();
  std::vector<ForkCopied::Range> used_ranges() const;

  base::SharedMemory memory_;
  const std::uint64_t limit_bytes_;
  const std::uint64_t kept_free_bytes_;
  const std::string capacity_limit_;
  std::unique_ptr<SizeClass[]> classes_;
  // The slab of each page; null for pages of large blocks. See "Memory ordering" above.
  struct UnmapSlabTable {
    std::size_t bytes;
    void operator()(Slab** table) const;
  };
  std::unique_ptr<Slab*[], UnmapSlabTable> slab_of_page_;

  mutable std::mutex pages_mutex_;  // guards the members below; acquired after the mutex of a size class
  PageHeap pages_;
  PageSet resident_;
  std::uint64_t resident_pages_ = 0;
  std::uint32_t dumped_end_ = 0;    // core dumps contain the pages before it, except large blocks that were trimmed
  std::uint64_t budget_bytes_ = 0;  // known to be available on the host
  std::uint64_t slab_pages_ = 0;
  bool is_copy_ = false;  // in a child made by fork()
  base::telemetry::ArenaCounters* published_ = nullptr;
  std::optional<ForkCopied> fork_copied_;  // in this_process()
};

}  // namespace lockstep::comm::arena
