// One communicator of NCCL, from its first name to its end.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/nccl/failure.h"
#include "lockstep/comm/nccl/library.h"
#include "lockstep/comm/nccl/nccl.h"

namespace lockstep::comm {

/// Nothing waits but close(). One thread at a time, which the owner sees to; the current device is the communicator's
/// meanwhile.
class NcclCommunicator {
 public:
  explicit NcclCommunicator(const NcclOptions& options);
  ~NcclCommunicator();

  /// Goes on connecting; true once that is done. What NCCL refuses is thrown, explained, as of operation `op`.
  bool connect(const std::string& op);
  bool connected() const { return stage_ == Stage::kConnected; }
  /// Instead of meeting the others at the store: what a split() of another has made.
  void set_split_comm(ncclComm_t split_comm);

  /// Throws unless `result` is good so far. `call`: what was called, with its parameters.
  void check(ncclResult_t result, const std::string& op, const std::string& call) const;
  /// True when what was called has been taken. Throws what has failed since.
  bool is_ready(const std::string& op, const std::string& call) const;
  /// A CUDA call has failed that was not NCCL's.
  [[noreturn]] void throw_cuda_failure(const std::string& op, const std::string& call) const;

  /// Begins to make the communicator of those of this one's ranks that say the same color (NCCL_SPLIT_NOCOLOR: none),
  /// into `*child`, which is there once this one has settled.
  void split(int color, int key, ncclComm_t* child);

  ncclComm_t get() const { return comm_; }
  /// The stream of its operations.
  c10::Stream stream() const { return *stream_; }

  /// Ends all that goes on, on a thread of its own. Does not wait.
  void abort() noexcept;
  /// The end in good order, up to 10 s; then abort().
  void close() noexcept;

 private:
  enum class Stage { kNoUniqueId, kConnecting, kConnected, kClosed };
  void init_rank(const std::string& op, const std::string& id);

  const NcclOptions options_;
  const NcclLibrary& nccl_ = NcclLibrary::loaded();
  const NcclLocation location_;
  Stage stage_ = Stage::kNoUniqueId;
  ncclComm_t comm_ = nullptr;
  std::optional<c10::Stream> stream_;
};

}  // namespace lockstep::comm
