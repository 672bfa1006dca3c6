// Averages between hosts every N reductions, instead of gradients in every step: one engine for DistributedDataParallel
// and for torch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::ddp::inline outer {

/// Local SGD between hosts (Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, 2018;
/// https://arxiv.org/abs/1808.07217). All ranks make the same calls in the same order.
class HostAverager {
 public:
  /// Replaces `flat` by its mean over all ranks, with the same bits everywhere. `equal_on_host`: the ranks of a host
  /// hold the same values, so that each byte can be sent once per host. Blocks until all ranks have called it.
  using Exchange = std::function<void(const at::Tensor& flat, bool equal_on_host)>;
  /// Gives `tensor` the values of `mean`.
  using Store = std::function<void(const at::Tensor& mean, const at::Tensor& tensor)>;

  /// `period`: the number of reductions between averages. Without an `exchange` there is one host, and nothing is sent.
  HostAverager(int period, Exchange exchange, Store store);

  /// Counts a reduction of gradients.
  void count_reduction() { ++num_reductions_; }
  /// Whether `period` reductions have been counted since the last average().
  bool is_due() const { return num_reductions_ >= period_; }
  /// Replaces each of the tensors that has floating-point numbers by its mean over all ranks, in buckets of one dtype,
  /// and begins a period: a checkpoint that is saved after it needs no state of this object. An outer optimizer would
  /// update its copy of the tensors here, between exchange and store.
  void average(const std::vector<at::Tensor>& tensors, bool equal_on_host);

 private:
  void average_bucket(const std::vector<at::Tensor>& tensors, bool equal_on_host) const;

  const int period_;
  const Exchange exchange_;
  const Store store_;
  int num_reductions_ = 0;
};

/// The exchange of a Group, and what else hosts agree on.
class HostLink {
 public:
  /// Splits `group`, so that its operations are independent of the user's; a collective of all ranks.
  explicit HostLink(const comm::Group& group);

  bool has_several_hosts() const { return has_several_hosts_; }
  /// `wire_dtype` is what float32 is sent as between hosts. Each byte is sent once per host (comm/hierarchy).
  HostAverager::Exchange exchange(at::ScalarType wire_dtype) const;
  /// Returns whether `value` is true on any rank. Blocks until all ranks have called it.
  bool any(bool value, const char* name) const;

 private:
  comm::Group group_;
  bool has_several_hosts_ = false;
};

}  // namespace lockstep::ddp::inline outer
