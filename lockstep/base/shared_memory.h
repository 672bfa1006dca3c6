// Memory that other processes can map: a sealed memfd without a name in the file system.
#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/base/fd.h"

namespace lockstep::base {

/// Owns a readable and writable mapping of a whole memfd, and its descriptor. Pages are allocated when they are first
/// touched or by reserve(), so a large mapping is cheap. If the kernel has no page at the first touch, it sends SIGBUS
/// or kills a process. A child created by fork() does not inherit the mapping, and a core dump does
/// not contain it: to write it, the kernel would allocate every page of the memory.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Creates `size` zeroed bytes that can neither grow nor shrink. `name` appears in /proc/PID/maps. Throws
  /// SystemError, also if `size` exceeds the limit on file sizes (ulimit -f), for which the kernel would send SIGXFSZ.
  static SharedMemory create(const char* name, std::size_t size);
  /// Maps memory that another process created with create(). Throws SystemError unless `fd` is a memfd of exactly
  /// `size` bytes with the same seals: if another process shrank the memfd, SIGBUS would kill its readers.
  static SharedMemory map(Fd fd, std::size_t size);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { unmap(); }

  /// Allocates the pages of `size` bytes from `offset` on that do not exist yet, so that touching them needs no more
  /// memory. Contents do not change. Returns 0, or errno if the kernel has no memory; some pages may then exist. On a
  /// kernel without fallocate() it returns 0 and does nothing. A control group that exceeds its limit in this call gets
  /// the kernel's out-of-memory killer, as at a first touch: compare HostMemory before.
  int reserve(std::size_t offset, std::size_t size) const noexcept;
  /// Spreads pages that are allocated from now on evenly over the NUMA nodes, for memory that ranks on all of them use.
  /// Does nothing if the kernel does not permit it, or if the process has a memory policy, as with numactl.
  void interleave() const noexcept;
  /// Makes core dumps contain `size` bytes from `offset` on, or not contain them. Both are multiples of the page size.
  void set_dumped(std::size_t offset, std::size_t size, bool dumped) const noexcept;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  const Fd& fd() const { return fd_; }

 private:
  SharedMemory(Fd fd, std::size_t size);
  void unmap() noexcept;

  Fd fd_;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

/// A second mapping of the beginning of a SharedMemory, whose writes other processes do not see: a page that this
/// process writes becomes a copy of its own, which from then on does not show what others write. Pages that were never
/// written need no memory. A child created by fork() inherits the mapping, whose other pages still show what is written
/// to the shared memory.
class PrivateView {
 public:
  /// How the pages that were written are found.
  enum class Detection {
    kPagemap,  ///< in /proc/self/pagemap, or as with kCompare where that cannot be read
    kCompare,  ///< by reading all of both mappings
  };
  /// Maps `size` bytes, a multiple of the page size, of `memory`, which must outlive this object. Throws SystemError.
  PrivateView(const SharedMemory& memory, std::size_t size, Detection detection = Detection::kPagemap);
  PrivateView(const PrivateView&) = delete;
  PrivateView& operator=(const PrivateView&) = delete;
  ~PrivateView();

  char* data() const { return data_; }
  std::size_t size() const { return size_; }

  /// Bytes [begin, end) of the mapping; both are multiples of the page size.
  struct Range {
    std::size_t begin, end;
  };
  /// Returns where this mapping and the shared memory differ. Other copies are dropped: their pages show the shared
  /// memory again. No thread may write either during the call. A system call that reads 8 bytes per page, if nothing
  /// was written.
  std::vector<Range> changes();
  /// Drops the copies of these pages.
  void drop(const std::vector<Range>& ranges) noexcept;

 private:
  std::vector<Range> written_pages() const;

  const SharedMemory& memory_;
  char* data_ = nullptr;
  const std::size_t size_;
  const std::size_t page_bytes_;
  Fd pagemap_;  // empty: kCompare
};

}  // namespace lockstep::base
