// GradientSource: the interface through which an optimizer obtains gradients from a DistributedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::ddp {

/// An optimizer that updates parameters during backward(). DistributedDataParallel calls it on the thread that runs
/// backward(), or on one of autograd's device threads.
class BackwardUpdater {
 public:
  virtual ~BackwardUpdater() = default;
  /// backward() has reached its first parameter. Returns a hash of the update that the sink will apply: the
  /// `options_hash` of GradientSource::run_pass(). A UsageError that it throws propagates out of backward().
  virtual std::uint64_t begin_update() = 0;
  /// backward() is complete. `consumed_chunks` is true if the sink has received the chunks of all gradients; otherwise
  /// the gradients are means, which the updater must now apply.
  virtual void end_update(bool consumed_chunks) = 0;
};

/// The gradients of a DistributedDataParallel, for one optimizer that updates parameters in the same pass that reads
/// all ranks' gradients. After the DistributedDataParallel is destroyed, every call except detach_optimizer() throws
/// UsageError.
class GradientSource {
 public:
  virtual ~GradientSource() = default;

  struct Parameter {
    std::string name;
    at::Tensor tensor;
  };
  /// All parameters whose gradients are averaged. A position in this list is a chunk's `gradient_index`.
  virtual std::vector<Parameter> parameters() const = 0;

  /// Attaches an optimizer; `sink` receives the chunks of run_pass(), and null means that the optimizer uses averaged
  /// gradients only. A collective: all ranks call it, and it blocks until they have.
  ///
  /// Returns true if ranks of this host can access each other's memory (host_group()), so that run_pass() is available.
  /// If host_group() contains all ranks, backward() from now on leaves each rank its own gradients and does not wait
  /// for other ranks; otherwise it averages gradients over all ranks as before. Returns false if run_pass() is not
  /// available: backward() averages as before, and run_pass() and allocate_shared() must not be called.
  ///
  /// In passes of a rank that has joined (see join()), this rank's sink receives no chunks; `sink->finish_gradient()`
  /// is called for the other ranks' updates. Throws CommError, and UsageError if an optimizer is already attached.
  virtual bool attach_optimizer(comm::ChunkSink* sink) = 0;
  /// True: gradients are this rank's own, as backward() left them, or means only in part (scatter_means()). False:
  /// gradients are means.
  virtual bool has_local_gradients() const = 0;
  /// Number of backward() calls that have reached a parameter.
  virtual std::uint64_t num_backwards() const = 0;
  /// From the next backward() on, calls `updater` at its beginning and end. Where backward() would leave each rank its
  /// own gradients, it passes their chunks to the sink of attach_optimizer() as soon as they are ready. A backward()
  /// that finds gradients of an earlier one, a nested backward(), and no_sync() then throw UsageError. Null ends this
  /// mode. Does not block. Throws UsageError under no_sync().
  virtual void update_in_backward(BackwardUpdater* updater) = 0;
  /// Throws UsageError during a backward(), when gradients are not complete and not averaged.
  virtual void require_outside_backward() const = 0;
  /// Throws UsageError if a gradient has changed since backward(). Checks only gradients that were recorded: local
  /// gradients, and gradients of a backward() with an updater.
  virtual void require_gradients_unchanged() const = 0;
  /// Reverts attach_optimizer(): backward() averages again.
  virtual void detach_optimizer() noexcept = 0;

  /// The optimizer calls this after it has updated parameters. With DdpOptions.average_hosts_every it may average the
  /// parameters between hosts, which blocks. Throws CommError.
  virtual void on_parameters_updated() = 0;
  /// The optimizer calls this instead when a loss scaler skips its step: with DdpOptions.average_hosts_every, the hosts
  /// count it nevertheless.
  virtual void on_update_skipped() = 0;

  /// Parameters are those that all ranks share between two steps: an optimizer has ended its step. Called otherwise by
  /// Group::step(). May average the parameters between hosts, as on_parameters_updated() does; otherwise it does not
  /// block.
  virtual void on_step_end() = 0;
  /// Counts a step of the group of the DistributedDataParallel (Group::step()).
  virtual void count_step() = 0;

  // host_group() does not block. The functions after it are collectives of host_group() unless stated otherwise: its
  // ranks call them in the same order, and each call blocks until all of them have made it. They throw CommError.
  virtual const comm::Group& host_group() const = 0;
  /// The parties between which optimizer state can be divided: the ranks, or, where ranks of a host share parameters,
  /// the hosts.
  struct ShardOwners {
    std::optional<comm::Group> group;  ///< contains one rank of each owner, ordered by owner; empty on other ranks
    int index = 0;                     ///< this rank's owner
    int count = 1;
    bool has_several_ranks = false;  ///< this rank's owner consists of several ranks, those of host_group()
  };
  /// Call after attach_optimizer(). From then on a rank depends on the updates of other ranks, and join() throws
  /// UsageError. A collective of all ranks.
  virtual ShardOwners shard_owners() = 0;
  /// From the next backward() on, owner o needs only the elements shards[o][i] of the mean of parameter i, counted in
  /// its memory. Between hosts, the other elements are then unspecified until average_gradients(); if that is called
  /// often, means are complete again. Does nothing elsewhere. Ends in detach_optimizer(), which drops gradients that
  /// are means in part. `owner` is that of this rank.
  virtual void scatter_means(const std::vector<std::vector<comm::ElementRange>>& shards, int owner) = 0;
  /// Allocates memory that all ranks of host_group() can access.
  virtual comm::SharedAllocation allocate_shared(std::size_t bytes) = 0;
  /// From now on, parameters are written through these tensors, one for each of parameters(), with the same layout and
  /// values, until detach_optimizer(). Does not block.
  virtual void set_parameter_memory(std::vector<at::Tensor> memory) = 0;
  /// Makes every gradient the mean over the ranks, if backward() has not done so.
  virtual void average_gradients() = 0;
  /// Passes the chunks of all gradients to the sinks of the ranks of host_group(). `options_hash` is a hash of what the
  /// sinks do: if it differs between ranks, they throw DesyncError before any sink receives a chunk. Throws UsageError
  /// if a gradient was changed after backward() while it was this rank's own; after average_gradients(), gradients may
  /// be changed if all ranks change them alike.
  virtual void run_pass(comm::GradientUse use, std::uint64_t options_hash, comm::ChunkSink& sink) = 0;
};

}  // namespace lockstep::ddp
