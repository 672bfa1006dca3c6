// Memory that other processes can map: a sealed memfd without a name in the file system.
#pragma once

#include <cstddef>

#include "lockstep/base/fd.h"

namespace lockstep::base {

/// Owns a readable and writable mapping of a whole memfd, and its descriptor. Pages are allocated when they are first
/// touched, so a large mapping is cheap. A child created by fork() does not inherit the mapping, and a core dump does
/// not contain it: to write it, the kernel would allocate every page of the memory.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Creates `size` zeroed bytes that can neither grow nor shrink. `name` appears in /proc/PID/maps. Throws
  /// SystemError.
  static SharedMemory create(const char* name, std::size_t size);
  /// Maps memory that another process created with create(). Throws SystemError unless `fd` is a memfd of exactly
  /// `size` bytes with the same seals: if another process shrank the memfd, SIGBUS would kill its readers.
  static SharedMemory map(Fd fd, std::size_t size);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { unmap(); }

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

}  // namespace lockstep::base
