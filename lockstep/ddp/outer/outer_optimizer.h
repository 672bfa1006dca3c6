// DiLoCo and SparseLoCo: the update of what all hosts have in common, from what each has learned.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/ddp/outer/outer_options.h"

namespace lockstep::ddp::inline outer {

/// This rank's place among the hosts, and what they exchange through. Of a vector, the first rank of each host
/// exchanges the first slice, the second rank the second one, and so on, as far as each host has such a rank.
struct HostExchange {
  using Wait = std::function<void()>;
  int num_hosts = 1, host = 0;
  std::vector<float> weights = {1};  ///< of the hosts, by their ranks; the sum is 1
  int num_slices = 1, slice = 0;     ///< a rank whose slice is num_slices or more has none
  /// Replaces `flat` by its mean over all ranks, with the same bits everywhere. `equal_on_host`: the ranks of a host
  /// hold the same values, so that each byte can be sent once per host. Null with one host. Blocks.
  std::function<void(const at::Tensor& flat, bool equal_on_host)> average{};
  /// Operations on bytes between the ranks that have this rank's slice, in the order of hosts. Each returns at once;
  /// the result is there when the Wait has returned. Null with one host.
  std::function<Wait(const at::Tensor& output, const at::Tensor& input)> all_to_all{}, all_gather{};
  /// Fills a vector, whose slices are equal parts, from the ranks of this host that have them. Blocks. Null for a rank
  /// that is alone.
  std::function<void(const at::Tensor& flat)> share{};
};

/// Keeps the copy of the parameters, in float32 on the CPU, each rank its slice. The hosts hold the same bits after
/// each round(), whatever their CPUs. `tensors` are the same parameters, of any floating-point or complex dtype, layout
/// and device, in every call. All ranks make the same calls in the same order.
class OuterOptimizer {
 public:
  using Store = std::function<void(const at::Tensor& values, const at::Tensor& tensor)>;

  /// `method` is not std::monostate. Throws UsageError for options that are out of range.
  OuterOptimizer(OuterMethod method, HostExchange exchange, Store store);

  bool has_begun() const { return !buckets_.empty(); }
  /// The tensors, which are equal on all hosts, become the copy. Not collective.
  void begin(const std::vector<at::Tensor>& tensors);
  /// Updates the copy, and gives the tensors its values. Blocks until all ranks have called it.
  void round(const std::vector<at::Tensor>& tensors);
  /// Gives the tensors the values of the copy. The ranks of a host call it together.
  void store_copy(const std::vector<at::Tensor>& tensors) const;

  /// As those of HostAverager.
  checkpoint::StateDict state_dict() const;
  void load_state_dict(const checkpoint::StateDict& state, const std::vector<at::Tensor>& tensors);

 private:
  /// Some tensors, whose numbers follow each other in a vector. What is sent and received lies in `sent` and
  /// `received` until it is applied.
  struct Bucket {
    std::size_t first = 0, last = 0;  // indices of its tensors; `last` is one past the end
    std::int64_t numel = 0;
    std::int64_t slice = 0;            // numbers of a slice; the last slices may be padded
    at::Tensor copy, momentum, error;  // this rank's slice
    at::Tensor owner_error;            // of the part of the mean that this rank sends to the other hosts
    at::Tensor sent{}, received{};
    HostExchange::Wait wait{};
  };
  using Piece = std::function<void(std::size_t tensor, std::int64_t from, std::int64_t to, std::int64_t count)>;

  bool is_diloco() const { return std::holds_alternative<DiLoCo>(method_); }
  bool has_slice() const { return exchange_.slice < exchange_.num_slices; }
  void for_each_piece(const Bucket& bucket, const std::vector<at::Tensor>& tensors, const Piece& use) const;
  void add_difference(Bucket& bucket, const std::vector<at::Tensor>& tensors) const;
  void send(Bucket& bucket, const std::vector<at::Tensor>& tensors) const;
  void combine(Bucket& bucket) const;
  void apply(Bucket& bucket, const std::vector<at::Tensor>& tensors) const;
  void store(const Bucket& bucket, const at::Tensor& slice, const std::vector<at::Tensor>& tensors) const;
  at::Tensor shared(const Bucket& bucket, const at::Tensor& slice) const;
  void update(Bucket& bucket, const at::Tensor& mean) const;

  const OuterMethod method_;
  const HostExchange exchange_;
  const Store store_;
  const double learning_rate_, momentum_;
  const bool loses_;  // a payload rounds, so there are errors to keep
  std::vector<Bucket> buckets_;
};

}  // namespace lockstep::ddp::inline outer
