// Writes from a thread of its own, so that a terminal or disk that stands still stops nobody else.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

namespace lockstep::launcher {

/// A bounded queue in front of blocking descriptors. When it is full, the oldest entries are dropped and counted. Used
/// by one thread.
class BackgroundWriter {
 public:
  /// `limit` bytes may wait. With `announce`, "lockstep: N lines dropped: the terminal was too slow" is written in the
  /// place of what was dropped; otherwise only dropped() tells.
  BackgroundWriter(std::size_t limit, bool announce);
  /// What is still queued is lost. A write that hangs is not waited for: its thread ends with the process.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  /// Queues `bytes`, which hold `lines` lines, for `fd`. With `keep` they are never dropped.
  void write(int fd, std::string bytes, int lines, bool keep = false);

  /// Waits until all is written, at most `patience` without any progress and `most` in all. False: something is left.
  bool drain(std::chrono::milliseconds stall_limit, std::chrono::milliseconds total_limit);

  /// Lines dropped so far.
  std::int64_t dropped() const;
  /// errno of the first write that failed; 0: none. What goes to a descriptor after it failed is thrown away.
  int error() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // with the thread, which may outlive this
  std::thread thread_;              // started by the first write
};

}  // namespace lockstep::launcher
