// Data-parallel training: the same model on every rank, each rank its own part of the batch, one mean gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/reducers/gradient_hook.h"

namespace torch::nn {
class Module;
}

namespace lockstep::ddp {

class GradientSource;

/// What happens to a model's buffers (BatchNorm's running statistics) in every exchange.
enum class BufferMode {
  kBroadcast,  ///< all get rank 0's (the first that has not joined)
  kMean,       ///< floating-point ones become the mean over the ranks, others as in kBroadcast
  kLocal,      ///< nothing: each rank keeps its own
};

struct DdpOptions {
  /// Gradients travel together in buckets of at least this many bytes: the first, and all others. Empty: chosen by a
  /// short measurement at construction, which rank 0 prints; over gloo with three or more ranks the order of additions,
  /// and so the last bits, follow the choice. Without meaning where gradients are reduced in place.
  std::vector<std::int64_t> bucket_bytes = {std::int64_t{1} << 20, std::int64_t{25} << 20};
  /// As stats().layout of the same model in a run that this one goes on from: gradients travel in the same buckets from
  /// the first backward() on, so that sums have the same bits. Empty: the first backward() says how. All ranks give the
  /// same.
  std::string bucket_layout;
  BufferMode buffers = BufferMode::kBroadcast;
  std::vector<std::string> ignore;           ///< names of parameters and buffers that are left alone
  std::shared_ptr<comm::GradientHook> hook;  ///< what happens to a bucket on its way; default: summed as it is
  /// What float32 gradients cross between hosts as: float32, bfloat16 or float16. Rounded once a host and once at the
  /// end, added in float32, the same bits everywhere. For the transport hierarchy; inside a host nothing is rounded.
  /// Not together with a hook, which says itself what travels.
  at::ScalarType wire = at::kFloat;
  /// N > 1: gradients are averaged inside each host, and every N exchanges the parameters (and floating-point buffers)
  /// between hosts, at the end of backward(), with an optimizer of lockstep::optim at the end of its step(): so traffic
  /// between hosts falls by N, and hosts differ by up to N updates. average_hosts() makes them equal. Ranks count
  /// alike: a host with more of them weighs more. A hook acts inside a host. Refused with join(). 1: gradients are
  /// averaged over all ranks.
  int average_hosts_every = 1;
  /// Gradients are divided by this before they are added, and the sum by what is left of the number of ranks: Apex's
  /// gradient_predivide_factor. 0: by that number before. Where gradients are reduced in place sums of bfloat16 and
  /// half are in float, and there is nothing to choose.
  double gradient_predivide_factor = 0;
  /// Every so many exchanges, and in the first ones after construction, the ranks compare 64 bits (XXH3) of each
  /// parameter: where one differs, a REPLICA_DIVERGED names it and the rank that is alone with its bits. 0: only in the
  /// first ones. Takes 0.1 ms a megabyte each time. Needless, and not done, where a host has one copy of the parameters
  /// and there is one host.
  int compare_replicas_every = 100;
  /// A gradient with an infinity or a NaN is a NON_FINITE on all ranks, which names the rank and the parameter, before
  /// it is averaged. One more pass over each gradient.
  bool check_finite = false;
  bool overlap = true;  ///< false: nothing travels before the end of backward()
};

/// Attaches to the parameters of a module, from construction to destruction; the module itself is neither wrapped nor
/// changed, and any of its methods may be called at any time on any number of ranks.
///
/// Construction waits for all ranks. It compares the models (CommError kConfigMismatch names the first difference on
/// every rank) and gives all ranks rank 0's parameters and buffers. A model without a parameter that requires a
/// gradient is a UsageError.
///
/// When backward() returns, on whatever was computed from the parameters in whatever way, every gradient that some
/// rank's backward reached is the mean over all ranks, the same bits everywhere; a rank whose backward did not reach it
/// counts as zero; one that nobody reached stays as it was. The exchange begins during backward(), except in the first
/// one, which only learns in which order gradients are born. Every rank must call backward() equally often outside
/// no_sync(): a rank that does not is named in a DesyncError on the others, and no gradient of another step is mixed in
/// as far as loaders made by make_loader(), Group::step(), gradients left over and backward() calls that reached
/// nothing can tell.
///
/// Gradients may live in memory of this object: do not keep one over a later backward(), copy it. After an error from
/// backward() their contents are unspecified. With create_graph the averaged gradients carry no graph. One thread calls
/// backward().
class DistributedDataParallel {
 public:
  DistributedDataParallel(torch::nn::Module& module, comm::Group group, DdpOptions options = {});
  /// For a torch::nn::ModuleHolder or a shared_ptr.
  template <typename Holder>
    requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
  DistributedDataParallel(Holder& holder, comm::Group group, DdpOptions options = {})
      : DistributedDataParallel(static_cast<torch::nn::Module&>(*holder), std::move(group), std::move(options)) {}
  ~DistributedDataParallel();
  DistributedDataParallel(DistributedDataParallel&&) noexcept;

  /// While it lives, backward() exchanges nothing on this rank: gradients accumulate here. The first backward() after
  /// it exchanges the accumulated sum. Nests. Waits for nobody.
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

  /// With average_hosts_every: averages parameters and floating-point buffers between hosts now, as before evaluating
  /// or saving. All ranks call it, and it waits for them. Otherwise nothing is left to do.
  void average_hosts();

  comm::Group& group();
  comm::ReducerStats stats() const;

  /// For lockstep::optim: its optimizers are made from a DistributedDataParallel.
  operator std::shared_ptr<GradientSource>() const;  // NOLINT(google-explicit-constructor)

 private:
  friend void join(const std::vector<DistributedDataParallel*>&, const std::function<void()>&,
                   const struct JoinOptions&);
  class Impl;
  std::shared_ptr<Impl> impl_;  // an optimizer may hold it too
};

struct JoinOptions {
  /// Means are divided by all ranks, also by those that have no more batches; false: by those that still have some.
  bool divide_by_initial_world_size = true;
};

/// Runs `loop`, a training loop whose number of batches differs between the ranks. A rank whose loop has ended keeps
/// the others company with zeros until all have ended; then all get the parameters and buffers of a rank that trained
/// to the end. List every model that the loop trains. An exception of `loop` comes out unchanged, and the other ranks
/// get a PeerLostError. As PyTorch's Join; waits for all ranks.
void join(const std::vector<DistributedDataParallel*>& models, const std::function<void()>& loop,
          const JoinOptions& options = {});
inline void join(DistributedDataParallel& model, const std::function<void()>& loop, const JoinOptions& options = {}) {
  join(std::vector<DistributedDataParallel*>{&model}, loop, options);
}

}  // namespace lockstep::ddp
