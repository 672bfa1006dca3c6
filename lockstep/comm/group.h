// The ranks of a job, or some of them, and what they can do together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/busy_scope.h"
#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/reducers/reducer_options.h"
#include "lockstep/comm/work.h"

namespace lockstep::comm {

/// "Start me again": EX_TEMPFAIL of sysexits.h.
inline constexpr int kPreemptedExitCode = 75;

struct World;
struct InitOptions;
class GradientHook;

/// What may be said with any operation.
struct CallOptions {
  std::string name;  ///< appears in errors, and must be equal on all ranks
  std::optional<base::Deadline>
      deadline;  ///< when it ends with a TimeoutError, whoever gets on; without it InitOptions.timeout decides
  /// all_reduce of float32: what crosses between hosts, float32, bfloat16 or float16. Each host's sum is rounded once,
  /// they are added in float32, and the result is rounded once. Ranks of one host exchange what they have; the
  /// transports gloo and mpi refuse others than float32.
  at::ScalarType wire = at::kFloat;
};

/// A small value; copies mean the same group. One thread uses a group at a time; split() makes more.
///
/// All ranks of a group make the same calls in the same order. Before any data moves the ranks compare kind, dtype,
/// shape, root, operator and name of the call; when they differ, every rank gets a DesyncError that names two ranks and
/// both calls. (Ranks that share memory compare when they meet for the operation; for others it is one exchange of 240
/// bytes a rank: docs/03 says how long that takes. It is also what barrier() is.) A rank that waits for one that died,
/// left, or waits for it in another operation is told so within about a second; everything else ends with a
/// TimeoutError at the operation's deadline, or when those it waits for have not got on for InitOptions.timeout. After
/// such an error the group is closed.
///
/// Tensors may have any strides: those that are not contiguous are copied. dtypes: float64, float32, float16, bfloat16,
/// int64, int32, int8, uint8, bool, on the CPU or on this rank's GPU; all ranks give tensors of one kind of device. The
/// mean of integers is refused; the sum of bool is "or", its product "and". Results are the same bits on every rank.
/// Errors in arguments are a UsageError on the rank that made them, and nothing is sent.
///
/// With tensors on a GPU an operation begins after what is on the thread's current stream, and what is put there after
/// it returns comes after its end: the CPU goes on meanwhile. What goes wrong on the GPU then ends the operation there
/// too, and the next call throws it. A Work is done when the GPU has done it.
class Group {
 public:
  int rank() const;
  int size() const;
  /// The number in the world of this group's rank `rank`.
  int global_rank(int rank) const;
  /// This process's number among those of its host, and their count.
  int local_rank() const;
  int local_size() const;
  int node_rank() const;
  int num_nodes() const;
  /// Where this rank computes: a GPU of its own where there are some, else the CPU. Of the GPUs that it sees
  /// (CUDA_VISIBLE_DEVICES) the one with its number on its host, from the beginning again when there are fewer; init()
  /// has made it the current one. InitOptions.device or LOCKSTEP_DEVICE says otherwise.
  at::Device device() const;
  /// "world", "world.1[0]", ...: for messages.
  const std::string& name() const;
  /// "gloo", ...
  std::string_view transport() const;

  // Each returns when this rank's tensors hold the result; the _async form returns at once.

  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
  Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});

  /// The result is on `root` only; elsewhere the tensor's contents are undefined afterwards.
  void reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
  Work reduce_async(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});

  void broadcast(const at::Tensor& tensor, int root, const CallOptions& options = {});
  Work broadcast_async(const at::Tensor& tensor, int root, const CallOptions& options = {});

  /// `output` has size() times the elements of `input`: rank 0's part first.
  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {});
  Work all_gather_async(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {});

  /// Parts of any shape, of one dtype; each rank's in its own shape.
  std::vector<at::Tensor> all_gather_unequal(const at::Tensor& input, const CallOptions& options = {});
  /// `outputs` is filled when the Work is done; it must live until then.
  Work all_gather_unequal_async(std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                const CallOptions& options = {});

  /// `input` has size() times the elements of `output`; rank r gets the reduction of all r-th parts.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      const CallOptions& options = {});
  Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                            const CallOptions& options = {});

  /// `output` as in all_gather() on `root`; an undefined tensor elsewhere.
  void gather(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {});
  Work gather_async(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {});

  /// `input` has size() times the elements of `output` on `root`; an undefined tensor elsewhere.
  void scatter(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {});
  Work scatter_async(const at::Tensor& output, const at::Tensor& input, int root, const CallOptions& options = {});

  /// Both have size() equal parts; part p of `input` goes to rank p.
  void all_to_all(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {});
  Work all_to_all_async(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {});

  /// To and from one other rank. The receiver compares the calls before it takes the data. Sends to a peer arrive in
  /// order.
  void send(const at::Tensor& tensor, int to, const CallOptions& options = {});
  Work send_async(const at::Tensor& tensor, int to, const CallOptions& options = {});
  void recv(const at::Tensor& tensor, int from, const CallOptions& options = {});
  Work recv_async(const at::Tensor& tensor, int from, const CallOptions& options = {});

  /// Returns when all ranks have called it. Waits for ranks, not for devices.
  void barrier(const CallOptions& options = {});
  Work barrier_async(const CallOptions& options = {});

  /// Byte strings of any length (at most 1 GiB). `bytes` of ranks other than `root` is not looked at.
  std::string broadcast_bytes(const std::string& bytes, int root, const CallOptions& options = {});
  std::vector<std::string> all_gather_bytes(const std::string& bytes, const CallOptions& options = {});

  /// The group of the ranks that gave the same `color` (>= 0), ordered by (key, rank). All ranks of this group call it.
  Group split(int color, int key = 0);

  /// The group of the ranks that share this rank's host, in their order. All ranks of this group call it.
  Group split_by_host();

  /// Ends a step: what is recorded and compared is numbered by it. A program that never calls it is numbered by its
  /// first model's backward. Waits for nobody.
  void step();
  std::int64_t steps() const;
  /// For ddp: this rank has kept others company, who have ended so many steps.
  void set_steps(std::int64_t steps);

  /// Long work of this rank gets on: those who wait for it go on waiting, and `lockstep run` does not take it for
  /// stuck. A batch drawn, a step and an operation say so by themselves. Takes some nanoseconds.
  void alive();
  /// The same, all the time, while what it returns lives: `const auto busy = world.busy("evaluate");`
  [[nodiscard]] BusyScope busy(const std::string& what) { return BusyScope(what); }

  /// Whether all ranks are to leave: one of them has got SIGTERM or SIGUSR1 since its first call of this. From that
  /// call on these signals only set a flag, which travels with the next exchange of gradients, so that all ranks read
  /// the same answer in the same step. Save then, let the last Group go, and return kPreemptedExitCode: `lockstep run`
  /// returns it too. A world of one reads its own flag. Waits for nobody.
  bool stop_requested();
  /// For ddp: the exchange that has ended brought such a wish.
  void set_stop_agreed();

  /// For loaders that hand all ranks equally many batches: one was drawn, from an order of samples with this
  /// fingerprint. Ranks whose counts differ, or, of the world's loaders, the sums of fingerprints, when gradients are
  /// exchanged are not in the same step: a DesyncError, not a wrong mean. Waits for nobody.
  void count_batch(std::uint32_t order = 0);

  /// For ddp: an exchange of gradients on a channel of its own. All ranks call it alike; waits for them.
  std::unique_ptr<GradientReducer> make_gradient_reducer(std::string name, std::vector<Part> parts,
                                                         ReducerOptions options);
  /// What the next exchange's header says about the process.
  StepIdentity step_identity() const;

  /// Closes the group with `error`, makes that the job's first cause, and throws it: for those who find out, above
  /// comm, that ranks disagree.
  [[noreturn]] void fail(const base::CommError& error);

 private:
  struct Impl;
  friend Group init(const InitOptions& options);
  std::unique_ptr<GradientReducer> make_undecorated_reducer(std::string name, std::vector<Part> parts,
                                                            ReducerOptions options);
  explicit Group(std::shared_ptr<World> world);
  explicit Group(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace lockstep::comm
