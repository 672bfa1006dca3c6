// Writes to descriptors from a separate thread, so that a slow terminal, reader or disk does not block the caller, and
// counts the output of ranks that has reached its destination, so that the agents may read more of it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::launcher::output {

struct WriterEntry {
  int fd = -1;
  std::string bytes;
  int lines = 0;                    ///< the number of lines in `bytes`
  bool keep = false;                ///< never drop it
  std::shared_ptr<void> receipt{};  ///< destroyed when the entry has been written or dropped
};

/// A queue in front of blocking descriptors. One thread may call its methods.
class BackgroundWriter {
 public:
  static constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

  /// Queues at most `limit` bytes, and then drops and counts the oldest entries. The first write that fails signals
  /// `failure_fd`, an eventfd that must outlive the writes; -1: none.
  explicit BackgroundWriter(std::size_t limit, int failure_fd = -1);
  /// Discards the queued entries. Does not wait for a write in progress: its thread is detached, because the write may
  /// block.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  /// Queues an entry. Does not block. Ignores an entry without bytes.
  void write(WriterEntry entry);

  /// Drops and counts all queued entries if no byte has been written for `stall_limit`, and destroys the receipt of the
  /// entry that is being written. Returns whether that is so.
  bool drop_if_stalled(std::chrono::milliseconds stall_limit);

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

/// A stream of a rank: stdout or stderr.
enum class Stream { kOut = 0, kErr = 1 };

/// A number of bytes of one stream that are written, or will not be.
struct OutputAck {
  int rank = -1;
  Stream stream = Stream::kOut;
  std::size_t bytes = 0;
};

/// Collects acknowledgements. Of each stream it returns one only when half of the window has been acknowledged, so that
/// ranks that write little cause none. Thread-safe.
class OutputAcks {
 public:
  /// `window` is JobPlan::output_window.
  OutputAcks(std::size_t num_ranks, std::size_t window);

  /// Returns a receipt for bytes of a stream. When its last copy is destroyed, the bytes are acknowledged. It may
  /// outlive this object.
  std::shared_ptr<void> receipt(int rank, Stream stream, std::size_t bytes);

  /// Returns a descriptor that is readable while take() returns something.
  int fd() const;
  std::vector<OutputAck> take();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::launcher::output
