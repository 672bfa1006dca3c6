// GroupAccess: what modules above comm need of a Group and programs do not. Not included by lockstep.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/interface/pending.h"
#include "lockstep/comm/reducers/reducer_options.h"

namespace lockstep::job {
class Store;
}  // namespace lockstep::job

namespace lockstep::comm {

struct ExternalRendezvous;

/// A call of another library, which executes it on a device, for GroupAccess::watch().
struct WatchedCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  at::Tensor tensor = {};  ///< whose dtype and shape the ranks compare; may be undefined
  bool may_shapes_differ = false;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::string name = {};
  bool is_compared = true;              ///< false for a call that not all ranks make
  std::function<void()> on_error = {};  ///< called while the error is handled, by the thread that has found it
};

/// A start of a job.
struct JobStart {
  std::string job;     ///< the name that distinguishes jobs; "0" without a launcher
  int generation = 0;  ///< how many times the launcher has started this job before
};

/// Functions of a Group for ddp, data, train, optim and checkpoint. Each group counts its own steps and batches, so
/// that two groups can train on two threads; a stop request concerns the whole process. Threads: as Group, unless
/// stated.
struct GroupAccess {
  using Impl = Group::Impl;  ///< for comm

  /// Sets the number of steps: on a rank that has joined and follows the steps of the other ranks, and in a training
  /// that resumes.
  static void set_steps(const Group& group, std::int64_t steps);

  /// Calls `observer` at the end of each Group::step() of the group, on its thread, as long as the returned object
  /// exists.
  [[nodiscard]] static std::shared_ptr<const void> on_step(const Group& group, std::function<void()> observer);

  /// Records that a finished reduction contained a stop request: Group::stop_requested() returns true from then on.
  static void set_stop_agreed(const Group& group);

  /// For loaders that give all ranks the same number of batches: counts one batch, drawn from a sample order with this
  /// hash, whose parts StepIdentity::sample_order_parts explains. If the ranks' counts, or the sums of the hashes,
  /// differ when gradients of a model of this group are reduced, the ranks are not in the same step, and the reduction
  /// throws a DesyncError. Does not block. Any thread may call it.
  static void count_batch(const Group& group, std::uint32_t sample_order_hash = 0,
                          std::uint16_t sample_order_parts = 0);

  /// Returns what this process contributes to the header of the next reduction.
  static StepIdentity step_identity(const Group& group);

  /// Returns a reducer for the gradients `specs` with a channel of its own. All ranks must call it with equal
  /// arguments; blocks until they have. Throws UsageError for options that the transport does not support.
  static std::unique_ptr<GradientReducer> make_gradient_reducer(const Group& group, std::string name,
                                                                std::vector<GradientSpec> specs,
                                                                reducers::ReducerOptions options);

  /// For init().
  static Group init(const InitOptions& options, const ExternalRendezvous* rendezvous);

  /// Returns the group of these world ranks, which all of them must call, and no other rank, with the same list and the
  /// same `name`, unique in the job; blocks until they have. Throws UsageError if this rank is not in the list.
  static Group make_group(const Group& group, std::string name, std::vector<int> world_ranks);

  /// Returns at once. The thread of the group's asynchronous operations compares `call` with those of the other ranks,
  /// and then waits until `done` is. Call it before the other library, which may block until all ranks have called it.
  /// An error of either closes the group, as that of an operation. The returned Work need not be waited for. No two
  /// calls of a group may overlap.
  static Work watch(const Group& group, WatchedCall call, PendingPtr done);
  /// Closes the group on all ranks, because of `why`.
  static void abandon(const Group& group, const std::string& why) noexcept;

  static JobStart job_start(const Group& group);

  /// Returns the part of the job's store that belongs to the group: for waits that no collective can do.
  static std::shared_ptr<job::Store> store(const Group& group);
  /// Returns a key for leave_value(). All ranks must call it in the same order. Does not block.
  static std::string new_value_key(const Group& group);
  /// Stores `value`, of at most 1 MiB, for this rank under `key`. On the rank that stores last, returns the values of
  /// all ranks in their order; on the others, nothing. Does not wait for the other ranks. Throws as job::Store does.
  static std::vector<std::string> leave_value(const Group& group, const std::string& key, std::string_view value);

  /// Closes the group with `error`, publishes it as the job's first cause, and throws it. For a disagreement between
  /// ranks that a module above comm has detected.
  [[noreturn]] static void fail(const Group& group, const base::CommError& error);
};

}  // namespace lockstep::comm
