// Group: the handle through which a rank runs collective and point-to-point operations with other ranks of its job.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/work.h"

namespace lockstep::comm {

/// While a BusyScope exists, this rank counts as making progress, so no wait of another rank times out because of this
/// rank. Group::busy() makes one. Any thread may create or destroy it. Scopes may nest or overlap; status reports name
/// the most recent scope that still exists.
class BusyScope {
 public:
  explicit BusyScope(const std::string& what);
  ~BusyScope();
  BusyScope(const BusyScope&) = delete;
  BusyScope& operator=(const BusyScope&) = delete;
};

/// Exit code that asks the scheduler to start the job again (EX_TEMPFAIL of sysexits.h).
inline constexpr int kPreemptedExitCode = 75;

struct World;
struct InitOptions;

/// Options that every operation accepts.
struct CallOptions {
  /// Name of the operation in error messages. It must be equal on all ranks and must not contain control characters.
  std::string name = {};
  /// The remedy that a DesyncError shows if other ranks wait in other operations; it must exist as long as the
  /// operation. Empty: that for calls in general.
  std::string_view hint = {};
  /// The operation ends with a TimeoutError at this deadline, even if the other ranks make progress. Without a
  /// deadline, only InitOptions.timeout applies.
  std::optional<base::Deadline> deadline = {};
  /// all_reduce of float32 only: the dtype in which data is sent between hosts (float32, bfloat16, float16 or, for sums
  /// and means, int8: with a scale for 256 numbers, of which the largest is 127). Each host's sum is rounded once, the
  /// sums are added in float32, and the result is rounded once. Tensors of at most 4 KiB are sent in float32, and data
  /// that stays within a host is not rounded. The transports tcp and mpi accept float32 only.
  at::ScalarType wire_dtype = at::kFloat;
};

/// A group of ranks and the operations between them. Group is a small value; copies refer to the same group. All member
/// functions are const, because none changes which group the value refers to: a function that uses a group takes a
/// `const Group&`.
///
/// Threads: only one thread may use a group at a time. split() makes groups for other threads.
///
/// Order: all ranks of a group must make the same calls in the same order. Before any data moves, the ranks compare the
/// kind, dtype, shape, root, reduce operator and name of the call. If they differ, every rank throws a DesyncError that
/// names two ranks and both calls. Ranks that share memory compare while they synchronize for the operation; other
/// transports exchange 240 bytes per rank first (docs/guide/03-how-a-step-works.md has the cost). A barrier() consists
/// of this comparison alone.
///
/// Failures: if a rank waits for a rank that died, that left, or that waits for it in another operation, the wait ends
/// with an error within about a second. Every other wait ends with a TimeoutError at the operation's deadline, or when
/// the awaited ranks have made no progress for InitOptions.timeout. After such an error the group is closed: every
/// later call throws the same error. An invalid argument throws a UsageError on the calling rank, and nothing is sent.
///
/// Tensors: any strides are accepted; tensors that are not contiguous are copied. The dtypes are float64, float32,
/// float16, bfloat16, int64, int32, int8, uint8 and bool. Tensors are on the CPU or on this rank's GPU, and all ranks
/// must pass tensors on the same type of device. ReduceOp::kMean requires a floating-point dtype. The sum of bool is
/// "or", its product is "and". The result has the same bits on every rank.
///
/// GPUs: an operation on GPU tensors starts after the work that is already on the calling thread's current stream, and
/// work that is enqueued there after the call returns runs after the operation. The call does not block the CPU until
/// the operation has finished on the GPU. If the operation fails on the GPU, the next call throws the error. A Work is
/// done when the GPU has finished the operation.
class Group {
 public:
  int rank() const;
  int size() const;
  /// Returns the world rank of this group's rank `rank`.
  int global_rank(int rank) const;
  /// Returns the index of this process among the ranks of its host.
  int local_rank() const;
  /// Returns the number of ranks on this host.
  int local_size() const;
  /// Returns the index of this rank's host.
  int node_rank() const;
  int num_nodes() const;
  /// Returns the device of this rank: a GPU if any is visible to the process, else the CPU. Among the visible GPUs
  /// (CUDA_VISIBLE_DEVICES), the rank uses the one whose index is local_rank() modulo their number, and init() makes
  /// that GPU the current one. InitOptions.device and LOCKSTEP_DEVICE override the choice.
  at::Device device() const;
  /// Returns the name of the group in messages: "world", "world.1[0]", ...
  const std::string& name() const;
  /// Returns the name of the transport for CPU tensors: "shm", "tcp", ...
  std::string_view transport() const;

  // Each operation has two forms. The first blocks until this rank's tensors hold the result. The _async form returns
  // at once with a Work; the tensors must not be used before the Work is done.

  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;

  /// Reduces to `root`. On the other ranks, the contents of `tensor` are undefined afterwards.
  void reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  Work reduce_async(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum,
                    const CallOptions& options = {}) const;

  void broadcast(const at::Tensor& tensor, int root, const CallOptions& options = {}) const;
  Work broadcast_async(const at::Tensor& tensor, int root, const CallOptions& options = {}) const;

  /// Concatenates the ranks' inputs in rank order. `output` must have size() times as many elements as `input`.
  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {}) const;
  Work all_gather_async(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {}) const;

  /// Gathers tensors whose shapes may differ between ranks; the dtype must be equal. Returns one tensor per rank, in
  /// that rank's shape.
  std::vector<at::Tensor> all_gather_unequal(const at::Tensor& input, const CallOptions& options = {}) const;
  /// Fills `outputs` before the Work is done. `outputs` must stay valid until then.
  Work all_gather_unequal_async(std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                const CallOptions& options = {}) const;

  /// Splits `input` into size() equal parts; rank r gets the reduction of the r-th parts. `input` must have size()
  /// times as many elements as `output`.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      const CallOptions& options = {}) const;
  Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                            const CallOptions& options = {}) const;

  /// Like all_gather(), but only `root` receives the result. `output` is ignored on the other ranks and may be
  /// undefined there.
  void gather(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {}) const;
  Work gather_async(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {}) const;

  /// Splits the `input` of `root` into size() equal parts; rank r gets the r-th part. On `root`, `input` must have
  /// size() times as many elements as `output`. `input` is ignored on the other ranks and may be undefined there.
  void scatter(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {}) const;
  Work scatter_async(const at::Tensor& output, const at::Tensor& input, int root,
                     const CallOptions& options = {}) const;

  /// Splits both tensors into size() equal parts; part p of `input` goes to rank p.
  void all_to_all(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {}) const;
  Work all_to_all_async(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {}) const;

  /// Sends to, or receives from, one other rank of the group. Before it accepts data, the receiver compares the dtype,
  /// shape and name of both calls and throws a DesyncError if they differ. Messages between two ranks arrive in the
  /// order in which they were sent.
  void send(const at::Tensor& tensor, int to, const CallOptions& options = {}) const;
  Work send_async(const at::Tensor& tensor, int to, const CallOptions& options = {}) const;
  void recv(const at::Tensor& tensor, int from, const CallOptions& options = {}) const;
  Work recv_async(const at::Tensor& tensor, int from, const CallOptions& options = {}) const;
  /// Receives from the rank that sends to this one first, and returns its rank. If recv_async() calls are in progress
  /// at the same time, either may take a message of their sender. A wait for any rank ends with an error when all other
  /// ranks have finished, or none of them has made progress for InitOptions::timeout. recv_any_async() writes the rank
  /// to `source`.
  int recv_any(const at::Tensor& tensor, const CallOptions& options = {}) const;
  Work recv_any_async(const at::Tensor& tensor, std::shared_ptr<int> source, const CallOptions& options = {}) const;

  /// Blocks until all ranks have called it. It does not synchronize GPUs.
  void barrier(const CallOptions& options = {}) const;
  Work barrier_async(const CallOptions& options = {}) const;

  /// Sends byte strings of at most 1 GiB, whose lengths may differ between ranks. broadcast_bytes() ignores `bytes` on
  /// ranks other than `root`.
  std::string broadcast_bytes(const std::string& bytes, int root, const CallOptions& options = {}) const;
  std::vector<std::string> all_gather_bytes(const std::string& bytes, const CallOptions& options = {}) const;

  /// Returns the group of the ranks that passed the same `color` (0 or more), ordered by (key, rank). All ranks of this
  /// group must call it; blocks until they have.
  Group split(int color, int key = 0) const;

  /// Returns the group of the ranks on this rank's host, in their order here. All ranks of this group must call it;
  /// blocks until they have.
  Group split_by_host() const;

  /// Ends a step of this group, which counts its own. The checks of reductions use the number of the step. In a program
  /// that never calls it, the backward() of the first model counts steps. Does not block, except in a step in which
  /// models average their parameters between hosts (DdpOptions.average_hosts_every); throws CommError if that fails.
  void step() const;
  std::int64_t steps() const;

  /// Reports that long work of this rank makes progress: ranks that wait for this one keep waiting, and `lockstep run`
  /// does not treat it as stuck. Loading a batch, a step and an operation report progress by themselves. Takes a few
  /// nanoseconds.
  void alive() const;
  /// Reports progress continuously while the returned object exists: `const auto busy = world.busy("evaluate");`
  [[nodiscard]] BusyScope busy(const std::string& what) const { return BusyScope(what); }

  /// Returns whether all ranks should save and exit, because one of them has received SIGTERM, SIGUSR1 or (as
  /// Ctrl-C sends it, unless the program has a handler of its own) SIGINT since its first call of this function. The
  /// first call installs handlers that only set a flag; children made by fork() do not have them. The next reduction of
  /// gradients sends the flag to all ranks, so all ranks get the same answer in the same step. When it is true, save,
  /// destroy the last Group and return kPreemptedExitCode; `lockstep run` then returns that code too. A world of one
  /// rank reads its own flag. Does not block.
  bool stop_requested() const;

 private:
  struct Impl;
  friend struct GroupAccess;
  explicit Group(std::shared_ptr<World> world);
  explicit Group(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace lockstep::comm
