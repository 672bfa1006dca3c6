// An NCCL communicator, from its unique id to its destruction.
#pragma once

#include <c10/core/Stream.h>

#include <optional>
#include <string>

#include "lockstep/comm/nccl/failure.h"
#include "lockstep/comm/nccl/library.h"
#include "lockstep/comm/nccl/nccl.h"

namespace lockstep::comm::nccl {

/// Only close() blocks. Not thread-safe: the owner serializes the calls, and sets the current device to the
/// communicator's GPU during each of them.
class NcclCommunicator {
 public:
  explicit NcclCommunicator(const NcclOptions& options);
  ~NcclCommunicator();

  /// Continues connecting without waiting. Returns true once connected. Throws the exception that to_exception() makes
  /// of an NCCL error, with `op` as the name of the operation.
  bool connect(const std::string& op);
  bool connected() const { return stage_ == Stage::kConnected; }
  /// Uses the result of another communicator's split() instead of a rendezvous at the store.
  void set_split_comm(ncclComm_t split_comm);

  /// Throws if `result` is an error. `call` describes the call and its parameters.
  void check(ncclResult_t result, const std::string& op, const std::string& call) const;
  /// Returns true when NCCL has finished the last nonblocking call, false while it is in progress. Throws if the call,
  /// or anything since, has failed.
  bool is_ready(const std::string& op, const std::string& call) const;
  /// Throws the error of a CUDA call that is not NCCL's.
  [[noreturn]] void throw_cuda_failure(const std::string& op, const std::string& call) const;

  /// Begins to create a communicator of the ranks with the same `color` (NCCL_SPLIT_NOCOLOR: none) in `*child`, which
  /// is valid once is_ready() of this communicator returns true.
  void split(int color, int key, ncclComm_t* child);

  ncclComm_t get() const { return comm_; }
  /// The stream of the communicator's operations. Requires connected().
  c10::Stream stream() const { return *stream_; }

  /// Ends all operations with ncclCommAbort() on a detached thread. Does not wait.
  void abort() noexcept;
  /// The same for a communicator that split() made; null is ignored.
  static void abort(ncclComm_t comm) noexcept;
  /// Finalizes and destroys the communicator; waits up to 10 s for the other ranks, then aborts.
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

}  // namespace lockstep::comm::nccl
