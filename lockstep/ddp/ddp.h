// Data-parallel training: every rank holds the same model, computes gradients on its own share of the batch, and gets
// their mean over all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/interface/gradient_hook.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/ddp/outer/outer_options.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/nn/module_ref.h"

namespace lockstep::ddp {

class GradientSource;

/// How a model's buffers (such as BatchNorm's running statistics) are synchronised in every reduction.
enum class BufferMode {
  kBroadcast,  ///< every rank receives the buffers of the lowest rank that has not joined (see join()); usually rank 0
  kMean,   ///< float32, float64, float16 and bfloat16 buffers become their mean; others are handled as in kBroadcast
  kLocal,  ///< each rank keeps its own buffers, which may then change their sizes
};

struct DdpOptions {
  /// Sizes of the gradient buckets in bytes: one value for all buckets, or two values: one for the first bucket and one
  /// for all others. A bucket holds at least this many bytes. Empty: a short measurement at construction chooses the
  /// sizes, and rank 0 prints them. Over MPI and NCCL with three or more ranks the choice changes the order of
  /// additions and therefore the last bits. Ignored where gradients are reduced in place.
  std::vector<std::int64_t> bucket_bytes = {std::int64_t{1} << 20, std::int64_t{25} << 20};
  /// stats().layout of the same model in the run that this run resumes: gradients use the same buckets from the first
  /// backward() on, so that sums have the same bits. Empty: the first backward() determines the layout. All ranks must
  /// pass the same value.
  std::string bucket_layout = {};
  BufferMode buffers = BufferMode::kBroadcast;
  std::vector<std::string> ignore = {};  ///< names of parameters and buffers that are neither broadcast nor averaged
  std::shared_ptr<comm::GradientHook> hook = nullptr;  ///< reduces each bucket; default: a plain sum
  /// Dtype in which float32 gradients are sent between hosts: float32, bfloat16 or float16. Each host's sum is rounded
  /// once and the result is rounded once; additions are in float32, and all ranks hold the same bits. Used by the
  /// transport hierarchy only; nothing is rounded within a host, or in a bucket of at most 4 KiB. Cannot be combined
  /// with a hook, which chooses its own wire format.
  at::ScalarType wire_dtype = at::kFloat;
  /// N > 1: gradients are averaged within each host only, and every N reductions the parameters and floating-point
  /// buffers are averaged between hosts: at the end of step() of an optimizer of lockstep::optim, in Group::step(), or,
  /// if neither follows a reduction, at the end of the next backward(). With an optimizer of torch, call Group::step()
  /// after each of its steps, also one that a loss scaler skips: otherwise the hosts may differ in what they call next,
  /// and wait for each other. Traffic between hosts falls by a factor of N, and hosts differ by up to N updates;
  /// average_hosts() makes them equal. Each host counts its own reductions, also one whose step a loss scaler skips; a
  /// faster host waits for the others every N of them. Every rank has the same weight, so a host with more ranks weighs
  /// more. A hook acts within a host. Cannot be combined with join(). 1 without `outer`: gradients are averaged over
  /// all ranks.
  int average_hosts_every = 1;
  /// What happens every average_hosts_every reductions instead of a mean of the parameters: DiLoCo{} or SparseLoCo{},
  /// which can send 4 to 140 times fewer bytes in a round. The copy of the parameters that the hosts have in
  /// common, in float32, is taken when the first backward() begins, or at the end of the warm-up; load weights before.
  /// Each round rounds float64 parameters to it. Buffers are still averaged.
  OuterMethod outer = {};
  /// Apex's gradient_predivide_factor: gradients are divided by this value before they are added, and the sum is
  /// divided by world size / value. 0: gradients are divided by the world size before they are added. Ignored where
  /// gradients are reduced in place, because sums of bfloat16 and half are computed in float there.
  double gradient_predivide_factor = 0;
  /// Every N reductions, and in the first few after construction, the ranks compare a 64-bit hash (XXH3) of each
  /// parameter, as it was when the last step ended (Group::step()), or as it is in a program that does not call step().
  /// If one differs, a REPLICA_DIVERGED error names the parameter and the rank whose hash is in the minority. 0: never.
  /// When the DistributedDataParallel is destroyed, they are compared once more, through the job's store, and a
  /// difference is a warning. Each comparison costs 0.1 ms per megabyte. Skipped if all ranks are on one host and share
  /// one copy of the parameters.
  int compare_replicas_every = 100;
  /// A gradient with an infinity or a NaN raises NON_FINITE on all ranks before it is averaged; the error names the
  /// rank and the parameter. Costs one more pass over each gradient.
  bool check_finite = false;
  bool overlap = true;  ///< false: no reduction starts before the end of backward()
};

/// Calls visit(name, member) for each member of DdpOptions, const or not: to compare the options of the ranks, and to
/// read those of Python. A member that is added to the struct and not here does not compile.
template <typename Options, typename Visitor>
void visit_options(Options& options, Visitor&& visit) {
  auto& [bucket_bytes, bucket_layout, buffers, ignore, hook, wire_dtype, average_hosts_every, outer,
         gradient_predivide_factor, compare_replicas_every, check_finite, overlap] = options;
  visit("bucket_bytes", bucket_bytes);
  visit("bucket_layout", bucket_layout);
  visit("buffers", buffers);
  visit("ignore", ignore);
  visit("hook", hook);
  visit("wire_dtype", wire_dtype);
  visit("average_hosts_every", average_hosts_every);
  visit("outer", outer);
  visit("gradient_predivide_factor", gradient_predivide_factor);
  visit("compare_replicas_every", compare_replicas_every);
  visit("check_finite", check_finite);
  visit("overlap", overlap);
}

/// Averages the gradients of a module's parameters over the ranks of a group, from construction to destruction. The
/// module is neither wrapped nor changed; any of its methods may be called at any time on any number of ranks.
///
/// Construction blocks until all ranks have called it. It compares the models (on a difference every rank throws
/// CommError kConfigMismatch, which names the first one) and copies rank 0's parameters and buffers to all ranks.
/// Throws UsageError for a model without a parameter that requires a gradient.
///
/// When backward() returns, each gradient that backward() computed on at least one rank is the mean over all ranks,
/// with the same bits on every rank (an optimizer of lockstep::optim may change that: FusedOptimizer,
/// FusedOptions.shard_state); a rank that did not compute it contributes zero. A gradient that no rank computed
/// is unchanged. Reduction overlaps with backward(), except in the first backward(), which records the order in which
/// gradients become ready and reduces them at its end. Outside no_sync(), every rank must call backward() the same
/// number of times: otherwise the other ranks throw DesyncError, which names the rank. To keep gradients of different
/// steps apart, each reduction also compares between the ranks: the number of Group::step() calls, the number of
/// batches drawn from loaders of make_loader() (both of this group), the number of count_optimizer_step() calls,
/// whether gradients of an earlier backward() existed, and the number of backward() calls that have failed; the passes
/// of an optimizer of lockstep::optim compare the number of backward() calls.
///
/// Only a backward() that reaches a parameter of the module counts. Any rank may call backward() of other graphs at any
/// time, on any thread. The thread that calls backward() of this module may change from step to step, but two threads
/// at a time are refused (UsageError). Several threads can train a module each, if every module has a
/// DistributedDataParallel on a group of its own (Group::split()).
///
/// The module's tensors may be frozen, unfrozen and filled with new values, also by torch::load(). If a parameter or
/// buffer is replaced, added, removed, or gets another dtype, size or device, the next backward(), or step() of an
/// optimizer of lockstep::optim, throws UsageError and names it. (Where the ranks share the memory of parameters, an
/// optimizer of lockstep::optim refuses torch::load(), too.) The thread that made this object, and later the one that
/// calls backward(), checks it.
///
/// Gradients of complex parameters are averaged like pairs of real ones. A parameter of any other dtype than float32,
/// float64, float16, bfloat16, complex64 and complex128 must not require a gradient; buffers may have any dtype. The
/// constructor throws UsageError for a sparse parameter or buffer, unless DdpOptions.ignore names it; gradients may be
/// sparse.
///
/// Gradients may be stored in memory that this object owns: copy a gradient to keep it beyond the next backward().
/// After an error in backward(), the contents of gradients are unspecified. If it came when gradients were being
/// reduced already, every later backward() throws, on all ranks: make a new DistributedDataParallel of the module.
/// After a backward() with create_graph, an averaged gradient has the graph of this rank's own one: a backward()
/// through it adds the derivative of the mean. Keep this object as long as the module trains: when it is destroyed
/// without ever having averaged gradients, rank 0 prints a warning.
///
/// A parameter must not belong to two of these objects at the same time: backward() throws UsageError. If two modules
/// share one, name it in DdpOptions.ignore of one of them.
class DistributedDataParallel {
 public:
  [[nodiscard("gradients are averaged only while the DistributedDataParallel exists")]]
  DistributedDataParallel(nn::ModuleRef module, comm::Group group, DdpOptions options = {});
  /// The same for a model that is not a torch::nn::Module, such as a torch::jit::Module or one written in Python. It is
  /// not checked for tensors that were replaced, added or removed.
  [[nodiscard("gradients are averaged only while the DistributedDataParallel exists")]]
  DistributedDataParallel(ModelTensors model, comm::Group group, DdpOptions options = {});
  ~DistributedDataParallel();
  DistributedDataParallel(DistributedDataParallel&&) noexcept;

  /// RAII guard: while it exists, backward() only accumulates gradients on this rank. The first backward() after its
  /// destruction reduces the accumulated sum. Guards may be nested. Create and destroy a guard on the thread that calls
  /// backward(). Does not block. Throws UsageError if an optimizer updates parameters in backward()
  /// (update_in_backward()).
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DistributedDataParallel& ddp);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedDataParallel& ddp_;
  };
  NoSync no_sync() { return NoSync(*this); }

  /// For a model that is not a torch::nn::Module: the program has replaced `buffer` by `tensor`, of the same dtype,
  /// sizes and device, which is synchronised from now on. Not with average_hosts_every. Does not block.
  void replace_buffer(const at::Tensor& buffer, const at::Tensor& tensor);

  /// With average_hosts_every: averages parameters and floating-point buffers between hosts now, for example before
  /// evaluating or saving, and begins the count of reductions anew; with DdpOptions.outer, a round, unless none has
  /// been counted. A round of fewer steps changes the training: to evaluate, use with_global_copy(). A collective: all
  /// ranks call it, and it blocks until they have. Throws CommError. Without average_hosts_every it does nothing.
  void average_hosts();

  /// With DdpOptions.outer: calls `body`, for example an evaluation, with the parameters that the hosts had in common
  /// after the last round, and then gives them their own values again. In the warm-up they are the rank's own. A
  /// collective of the ranks of a host, also if `body` throws: it must throw on all of them. Throws UsageError without
  /// `outer`, and what `body` throws.
  void with_global_copy(const std::function<void()>& body);

  /// Whether hosts train apart: average_hosts_every is above 1, or DdpOptions.outer is set.
  bool hosts_differ() const;

  /// With average_hosts_every or DdpOptions.outer: what this host needs to resume, also between two rounds, besides its
  /// parameters and its optimizer, which differ between hosts. A TrainingState to which this object was added saves all
  /// of it. A collective of the ranks of a host; blocks. Empty without either option.
  checkpoint::StateDict outer_state() const;
  /// Restores it, when the parameters have been restored. Throws UsageError. Does not block.
  void load_outer_state(const checkpoint::StateDict& state);

  /// Compares the parameters of all ranks now, for example at the end of a training or before saving; a
  /// REPLICA_DIVERGED error names the first that differs. A collective: all ranks call it, and it blocks until they
  /// have. Costs 0.1 ms per megabyte. With average_hosts_every it compares the ranks of each host. Does nothing where
  /// the ranks share one copy of the parameters.
  void compare_replicas();

  /// Counts a step of an optimizer that holds parameters of the module. If the ranks' counts differ, the next reduction
  /// throws DesyncError. For optimizers that do not call Group::step(), such as those of Python. Does not block.
  void count_optimizer_step();

  const comm::Group& group() const;
  comm::ReducerStats stats() const;

  /// Optimizers of lockstep::optim are constructed from a DistributedDataParallel through this conversion.
  operator std::shared_ptr<GradientSource>() const;  // NOLINT(google-explicit-constructor)

 private:
  friend std::optional<int> join(const std::vector<DistributedDataParallel*>&, const std::function<void()>&,
                                 const struct JoinOptions&);
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with the optimizer
};

struct JoinOptions {
  /// True: means are divided by the number of all ranks, including those that have joined. False: by the number of
  /// ranks that still have batches.
  bool divide_by_initial_world_size = true;
  /// The optimizers of torch::optim that the loop steps: after the loop, all ranks have the state of the rank that the
  /// parameters come from (broadcast_optimizer_state()). Those of lockstep::optim need not be listed.
  std::vector<torch::optim::Optimizer*> optimizers = {};
};

/// Runs `loop`, a training loop whose number of batches may differ between ranks, like PyTorch's Join. A rank whose
/// loop has ended takes part in the other ranks' reductions with zeros until every loop has ended; then all ranks
/// receive the parameters, the buffers (except with BufferMode::kLocal) and the state of JoinOptions.optimizers of a
/// rank that trained to the end. Returns that rank, or nothing if all ranks trained equally long. `models` must list
/// every model that the loop trains. Blocks until all ranks are done. Rethrows an exception of `loop` unchanged; the
/// other ranks then throw PeerLostError. Throws UsageError, before it calls `loop`, if `models` is empty, with
/// DdpOptions.average_hosts_every, with FusedOptions.shard_state, and for a model on several hosts with an optimizer of
/// lockstep::optim.
std::optional<int> join(const std::vector<DistributedDataParallel*>& models, const std::function<void()>& loop,
                        const JoinOptions& options = {});
inline std::optional<int> join(DistributedDataParallel& model, const std::function<void()>& loop,
                               const JoinOptions& options = {}) {
  return join(std::vector<DistributedDataParallel*>{&model}, loop, options);
}

}  // namespace lockstep::ddp
