// Writes to descriptors from a separate thread, so that a slow terminal or disk does not block the caller.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

namespace lockstep::launcher::output {

/// A bounded queue in front of blocking descriptors. When the queue is full, it drops and counts the oldest entries.
/// One thread may call its methods.
class BackgroundWriter {
 public:
  /// Queues at most `limit` bytes. The first write that fails signals `failure_fd`, an eventfd that must outlive the
  /// writes; -1: none.
  explicit BackgroundWriter(std::size_t limit, int failure_fd = -1);
  /// Discards the queued entries. Does not wait for a write in progress: its thread is detached, because the write may
  /// block.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  /// Queues `bytes`, which contain `lines` lines, for `fd`. Does not block. Entries with `keep` are never dropped.
  void write(int fd, std::string bytes, int lines, bool keep = false);

  /// Blocks until all entries are written, but for at most `stall_limit` without progress and at most `total_limit` in
  /// total. Returns false if entries are left.
  bool drain(std::chrono::milliseconds stall_limit, std::chrono::milliseconds total_limit);

  /// Returns the number of lines dropped.
  std::int64_t dropped() const;
  /// Returns the errno of the first write that failed; 0 if none has. Later bytes for a failed descriptor are
  /// discarded.
  int error() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // the thread shares it and may outlive this object
  std::thread thread_;              // started by the first write()
};

}  // namespace lockstep::launcher::output
