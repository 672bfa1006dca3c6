// The exchange that packs gradients into buckets and sums those over any transport.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/reducers/reducer_base.h"
#include "lockstep/comm/reducers/reducer_options.h"

namespace lockstep::comm {

/// On the wire, in this order, on all ranks:
///   header   56 bytes a rank, begun with the exchange;
///   order    in the first exchange only: in which order gradients were born, from which the buckets are laid out;
///   buckets  each as soon as all its parts are there and those before it have begun, without waiting for the header:
///   ranks lay
///            out alike in the same exchange whatever step they are in, so that buckets fit, and what a rank of another
///            step added is not delivered, because finish() compares the headers before;
///   along    what the owner gave to begin();
///   flags    two bytes a parameter: did any rank have a fresh dense, a fresh sparse gradient?
///   late     parts without a place in a bucket that turned out to be fresh somewhere: dense ones singly, sparse ones
///   by rows.
/// Parts that stay unused on all ranks for three exchanges lose their place in the buckets, and get one again after
/// their next use; all ranks see the same flags and decide alike. A gradient is written into its bucket once, divided
/// by the world size (or predivide) on the way, and never copied out: the bucket's memory is the gradient afterwards.
class BucketedReducer final : public ReducerBase {
 public:
  BucketedReducer(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel, ReducerOptions options);

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops) override;
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override;
  bool is_ready(std::size_t index) const override { return states_[index].ready; }
  Participation finish(GradientSink& sink) override;
  ReducerStats stats() const override;

 private:
  /// What is known of a part for good.
  struct Place {
    int bucket = -1;  // -1: none, it travels late
    at::Tensor view;  // of the bucket's memory, in the parameter's strides
    int unused = 0;   // exchanges since any rank used it
    bool sparse = false;
  };
  /// What is known of it in this exchange.
  struct GradientState {
    bool ready = false;
    bool fresh = false;
    bool packed = false;
    at::Tensor gradient;  // when it is sparse, late, or the plan is not made yet
    at::Tensor saved;     // a gradient that is not fresh and lives in the bucket, as it was
  };
  struct BucketState {
    Bucket bucket;
    std::vector<std::size_t> parts;
    std::size_t missing = 0;
    PendingPtr pending;
    std::optional<c10::Stream> stream;  // of a GPU: where it was written last
    std::int64_t start_ns = 0;          // for a trace; 0: nobody wants one
  };

  void build_buckets(const std::vector<std::size_t>& order);
  void restore_layout(const std::string& layout);
  std::vector<std::size_t> next_order() const;
  std::string layout() const;
  void rebuild_buckets_if_needed();
  void add_to_bucket(std::size_t index);
  void copy_into_bucket(Place& place, GradientState& state);
  void start_full_buckets();
  void fill_buckets();
  void start_bucket(BucketState& filling);
  static void synchronize_streams(BucketState& filling);
  void agree_on_order();
  void reduce_flags();
  std::vector<at::Tensor> reduce_late();
  void finish_buckets();
  static void trace(const BucketState& filling, std::int64_t wait_start_ns);
  void deliver(GradientSink& sink, const std::vector<at::Tensor>& late);
  void update_usage();
  bool is_fresh_on_any_rank(std::size_t index) const { return dense(index) || sparse(index); }
  bool dense(std::size_t index) const { return flag(index); }
  bool sparse(std::size_t index) const { return flag(specs_.size() + index); }
  bool flag(std::size_t at) const { return flags_.const_data_ptr<std::uint8_t>()[at] != 0; }

  const ReducerOptions options_;     // of float32 buckets, the wire
  const at::Tensor gradient_scale_;  // 1 / what gradients are divided by before they are added
  const double sum_scale_;           // what sums are multiplied by

  std::vector<Place> placements_;
  std::vector<BucketState> buckets_;
  std::vector<std::size_t> order_;  // of the parts in buckets; in the first exchange, of birth on this rank
  std::uint64_t layout_hash_ = 0;   // 0: there is none yet

  std::vector<GradientState> states_;
  std::size_t next_bucket_ = 0;  // the first bucket that has not begun
  bool is_finishing_ = false;
  at::Tensor flags_;
};

}  // namespace lockstep::comm
