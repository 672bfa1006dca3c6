// Hosts that train apart and become equal every N reductions: one engine for DistributedDataParallel and for torch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/ddp/outer/outer_optimizer.h"
#include "lockstep/ddp/outer/outer_options.h"

namespace lockstep::ddp::inline outer {

/// Counts reductions, and makes hosts equal when that is due. All ranks make the same calls in the same order.
class HostAverager {
 public:
  /// Gives `tensor` the values of `values`.
  using Store = std::function<void(const at::Tensor& values, const at::Tensor& tensor)>;

  /// `period`: the number of reductions between averages. With std::monostate and one host, nothing is done.
  HostAverager(int period, OuterMethod method, HostExchange exchange, Store store);

  /// Whether the first backward() begins and the outer optimizer has to begin before it. After a warm-up, average()
  /// begins it, when all hosts are equal.
  bool must_begin() const {
    return outer_ && !outer_->has_begun() && warm_up_ == 0 && num_steps_ == 0 && num_reductions_ == 0;
  }
  /// Not collective.
  void begin(const std::vector<at::Tensor>& parameters) { outer_->begin(parameters); }
  /// Counts a reduction of gradients, also one whose step a loss scaler skips.
  void count_reduction() { ++num_reductions_; }
  /// Whether `period` reductions have been counted since the last average(), or one of the warm-up.
  bool is_due() const { return num_reductions_ >= (is_warming_up() ? 1 : period_); }
  /// Makes the parameters equal on all hosts: their mean, or the outer optimizer's update of what hosts have in common;
  /// if no reduction has been counted since the last average, the hosts are equal, and the outer optimizer does
  /// nothing. Buffers become their mean; those that have no floating-point or complex numbers are left. Begins a
  /// period.
  void average(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
               bool buffers_equal_on_host);

  /// Gives the parameters the newest values that all hosts have had in common, and returns their own; put_back() gives
  /// them these again. The ranks of a host call both together. Throws UsageError without an outer optimizer.
  std::vector<at::Tensor> swap_in_copy(const std::vector<at::Tensor>& parameters);
  void put_back(const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& parameters);

  /// The counts, and the state of the outer optimizer on this host. The ranks of a host call it together; they get the
  /// same. Independent of the number of ranks on a host.
  checkpoint::StateDict state_dict() const;
  /// Restores it. A host that did not exist begins with what the hosts have in common and without the errors of
  /// another. Not collective. Throws UsageError.
  void load_state_dict(const checkpoint::StateDict& state, const std::vector<at::Tensor>& parameters);

 private:
  bool is_warming_up() const { return num_steps_ < warm_up_; }
  void take_mean(const std::vector<at::Tensor>& tensors, bool equal_on_host) const;

  const int period_;
  const int warm_up_;
  const HostExchange exchange_;
  const Store store_;
  std::optional<OuterOptimizer> outer_;
  std::int64_t num_reductions_ = 0;  // since the last average()
  std::int64_t num_steps_ = 0;       // before it
};

/// Returns for each rank of `group` the first rank of its host, by which a host is known. `inside`: those on this
/// rank's host, in their order in `group` (Group::split_by_host()). A collective of all ranks.
std::vector<int> first_ranks_of_hosts(const comm::Group& group, const comm::Group& inside);

/// The exchange of a Group, and what else hosts agree on.
class HostLink {
 public:
  /// Splits `group`, so that its operations are independent of the user's; a collective of all ranks.
  explicit HostLink(const comm::Group& group);

  bool has_several_hosts() const { return place_.num_hosts > 1; }
  const comm::Group& group() const { return group_; }
  /// `wire_dtype` is what float32 is sent as in a mean. Each byte is sent once per host (comm/hierarchy).
  HostExchange exchange(at::ScalarType wire_dtype) const;
  /// Returns whether `value` is true on any rank. Blocks until all ranks have called it.
  bool any(bool value, const char* name) const;

 private:
  comm::Group group_, inside_, across_;
  HostExchange place_;
};

}  // namespace lockstep::ddp::inline outer
