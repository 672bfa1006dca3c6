// Copies of shared memory for children made by fork().
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/base/shared_memory.h"

namespace lockstep::comm::arena {

/// Registers memory that other processes, or other mappings of this process, write: a mapping of shared memory, or a
/// PrivateView. As long as the object exists, each child made by fork() gets a copy of its own at the same address,
/// with the contents at the time of the fork, as of ordinary memory. The kernel cannot copy such pages when they are
/// written, so fork() copies all used ones before it returns: 0.26 s per GiB (2-core AMD EPYC, huge pages), in memory
/// that the child holds until it ends. If the host has not enough left, the memory is not accessible in the child, and
/// the parent logs a warning. vfork() and posix_spawn() copy nothing.
class ForkCopied {
 public:
  using Range = base::PrivateView::Range;
  /// `data` and `size` are multiples of the page size. `used` returns the ranges of the memory that are in use, in
  /// ascending order; null: all of it. fork() calls it.
  ForkCopied(char* data, std::size_t size, std::function<std::vector<Range>()> used = nullptr);
  ~ForkCopied();
  ForkCopied(const ForkCopied&) = delete;
  ForkCopied& operator=(const ForkCopied&) = delete;

 private:
  friend class ForkHandlers;
  char* const data_;
  const std::size_t size_;
  const std::function<std::vector<Range>()> used_;
  bool is_copy_ = false;  // in a child: its own children inherit the copy
};

/// While it exists, the children that this thread forks share the pages of one copy, with the contents at the first of
/// these forks. For children that are started together, such as the workers of a DataLoader: the thread must not write
/// registered memory in between.
class SharedForkCopies {
 public:
  SharedForkCopies();
  ~SharedForkCopies();
  SharedForkCopies(const SharedForkCopies&) = delete;
  SharedForkCopies& operator=(const SharedForkCopies&) = delete;

 private:
  friend class ForkHandlers;
  struct Copies;
  std::unique_ptr<Copies> copies_;
  SharedForkCopies* const outer_;
};

}  // namespace lockstep::comm::arena
