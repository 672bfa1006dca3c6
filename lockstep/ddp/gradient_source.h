// Where an optimizer gets its gradients from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::ddp {

/// An optimizer that updates in backward().
class BackwardUpdater {
 public:
  virtual ~BackwardUpdater() = default;
  /// backward() has reached its first parameter. Returns a fingerprint of what is done with pieces, as for
  /// GradientSource::give(). Throws UsageError, which leaves backward().
  virtual std::uint64_t begin_update() = 0;
  /// backward() is over. `given`: so have been all pieces; otherwise gradients are means.
  virtual void end_update(bool consumed_chunks) = 0;
};

/// The gradients of a DistributedDataParallel, for one optimizer that updates parameters in the pass that reads all
/// ranks' gradients. After the DistributedDataParallel has gone, every call but detach() is a UsageError.
class GradientSource {
 public:
  virtual ~GradientSource() = default;

  struct Parameter {
    std::string name;
    at::Tensor tensor;
  };
  /// All whose gradients are averaged; their place in this list is a piece's `part`.
  virtual std::vector<Parameter> parameters() const = 0;

  /// True: there are ranks on this host that reach each other's memory (sharers()), and give() has what it needs. If
  /// these are all ranks, backward() from now on leaves each its own gradients and waits for nobody; if there are
  /// others, it averages as ever. False: it averages as ever, and what follows detach() is of no use. `updated.taken()`
  /// is called for the updates of others in which this rank only keeps company. All ranks call it, and wait for each
  /// other. Null: the optimizer wants means, as where false is returned. Throws UsageError when there is an optimizer
  /// already, CommError.
  virtual bool attach_optimizer(comm::ChunkSink* updated) = 0;
  /// True: gradients are this rank's own, as backward() has left them. False: they are means.
  virtual bool has_local_gradients() const = 0;
  /// How many calls of backward() have reached a parameter.
  virtual std::uint64_t num_backwards() const = 0;
  /// From the next backward() on: each tells `updater` when it begins and ends, and where it would leave each rank its
  /// own gradients it gives their pieces to the sink of attach(), as they come. A backward() before which gradients are
  /// there, or in which another one runs, is a UsageError then, as is no_sync(). Null: no more. Waits for nobody.
  /// Throws UsageError under no_sync().
  virtual void update_in_backward(BackwardUpdater* updater) = 0;
  /// Throws UsageError when a gradient is not what backward() left, where that was noted: where it leaves each rank its
  /// own, and with an updater.
  virtual void require_gradients_unchanged() const = 0;
  /// backward() averages again.
  virtual void detach() noexcept = 0;

  /// Parameters have been updated. Waits for other hosts with DdpOptions.average_hosts_every. Throws CommError.
  virtual void updated() = 0;

  // The sharers call these alike, and wait for each other. They throw CommError.
  virtual comm::Group& host_group() = 0;
  /// Among whom state may be divided: the ranks, or, where ranks of a host share parameters, these hosts.
  struct ShardOwners {
    std::optional<comm::Group> group;  ///< of one rank of each owner, in their order; empty on other ranks
    int index = 0;                     ///< this rank's owner
    int count = 1;
    bool has_several_ranks = false;  ///< this rank's owner is several ranks, the sharers()
  };
  /// After attach(): from now on ranks need each other's updates, and join() is a UsageError. All ranks call it, and
  /// wait for each other.
  virtual ShardOwners owners() = 0;
  /// Memory that all of them see.
  virtual comm::SharedAllocation allocate_shared(std::size_t bytes) = 0;
  /// Makes every gradient the mean over the ranks, where backward() has not.
  virtual void average_gradients() = 0;
  /// Gives the pieces of all gradients to the sharers' sinks. `options` is a fingerprint of what the sinks do; ranks
  /// that differ in it get a DesyncError, and no sink anything. Throws UsageError when a gradient has been changed
  /// since backward(): it is not the mean that one may think; after average() they may be changed, on all ranks alike.
  virtual void run_pass(comm::GradientUse use, std::uint64_t options, comm::ChunkSink& sink) = 0;
};

}  // namespace lockstep::ddp
