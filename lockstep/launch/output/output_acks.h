// Counts the output of ranks that has reached its destination, so that the agents may read more of it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace lockstep::launcher::output {

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
