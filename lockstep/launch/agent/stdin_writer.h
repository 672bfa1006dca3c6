// Writes the launcher's standard input to ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/fd.h"

namespace lockstep::launcher::agent {

/// Writes each chunk of input to every rank that reads it, without blocking. Not thread-safe.
class StdinWriter {
 public:
  explicit StdinWriter(int epoll) : epoll_(epoll) {}

  /// Takes the write end of a rank's stdin and adds it to the epoll instance, edge-triggered and for writing, with the
  /// data `epoll_data`. Throws SystemError.
  void add_rank(base::Fd pipe, std::uint64_t epoll_data);

  /// Begins to write `bytes`; empty means the end of the input. The last chunk must have been taken.
  void write(std::string bytes);
  /// Continues. Call it when any of the pipes has become writable. Returns true once when all ranks have taken the
  /// chunk, or do not read any more.
  bool flush();

 private:
  struct RankStdin {
    base::Fd pipe;
    std::size_t written = 0;  // bytes of the chunk
  };

  const int epoll_;
  std::vector<RankStdin> ranks_;
  std::string chunk_;
  bool is_pending_ = false;
};

}  // namespace lockstep::launcher::agent
