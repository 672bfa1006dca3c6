// Memory that other processes can map: a sealed memfd, named nowhere in the file system.
#pragma once

#include <cstddef>

#include "lockstep/base/fd.h"

namespace lockstep::base {

/// A mapping of a whole memfd, readable and writable. Pages come when they are touched, so a large one costs nothing. A
/// child made by fork() does not inherit the mapping.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// A new one of `size` bytes, zeroed, which can neither grow nor shrink. `name` shows in /proc/PID/maps. Throws
  /// SystemError.
  static SharedMemory create(const char* name, std::size_t size);
  /// Maps what another process made by create(). Throws SystemError when `fd` is no memfd of exactly `size` bytes that
  /// is sealed so: one that could shrink would kill its readers.
  static SharedMemory map(Fd fd, std::size_t size);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { unmap(); }

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
