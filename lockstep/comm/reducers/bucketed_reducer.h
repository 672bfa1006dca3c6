// BucketedReducer: packs gradients into buckets and reduces the buckets over any transport.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/reducers/reducer_base.h"
#include "lockstep/comm/reducers/reducer_options.h"

namespace lockstep::comm::reducers {

/// Every reduction runs these operations, in this order, on all ranks:
///   header     64 bytes per rank, started by begin();
///   order      in the first reduction only, and only without ReducerOptions.layout: the order in which gradients were
///              computed, which determines the layout of the buckets;
///   buckets    each as soon as all its gradients are ready and all earlier buckets have started. They do not wait for
///              the headers: all ranks have the same layout in the same reduction, even if they are in different
///              steps. finish() compares the headers before it delivers any sum;
///   extra_ops  the operations that the owner passed to begin();
///   flags      two bytes per gradient: whether any rank has a fresh dense or a fresh sparse one;
///   late       gradients without a bucket that are fresh on some rank: dense ones one by one, sparse ones by rows.
///
/// A gradient that no rank uses for three reductions loses its place in the buckets and gets one again after its next
/// use. All ranks read the same flags, so they make the same decisions. A gradient is written into its bucket once, and
/// divided by the world size (or by gradient_predivide_factor) on the way. A mean is never copied out: the delivered
/// gradient is a view of the bucket's memory.
class BucketedReducer final : public ReducerBase {
 public:
  BucketedReducer(std::string name, std::vector<GradientSpec> specs, std::unique_ptr<channel::Channel> channel,
                  ReducerOptions options);

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink*) override;
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override;
  bool is_ready(std::size_t index) const override { return states_[index].ready; }
  Participation finish(GradientSink& sink) override;
  ReducerStats stats() const override;
  void set_needed(std::vector<std::vector<ElementRange>> needed) override;

 private:
  /// The state of a gradient that persists across reductions.
  struct Placement {
    int bucket = -1;  // -1: none, it is reduced late
    at::Tensor view;  // of the bucket's memory, in the parameter's strides
    int unused = 0;   // reductions since any rank used it
    bool sparse = false;
  };
  /// The state of a gradient in this reduction.
  struct GradientState {
    bool ready = false;
    bool fresh = false;
    bool packed = false;
    at::Tensor gradient;  // kept if it is sparse or late, or before there are buckets
    at::Tensor saved;     // copy of a gradient that is not fresh and is stored in the bucket
  };
  struct BucketState {
    Bucket bucket;
    std::vector<std::size_t> gradients;
    std::shared_ptr<const NeededElements> needed;  // null: all
    std::size_t missing = 0;
    PendingPtr pending;
    std::optional<c10::Stream> stream;  // GPU only: the stream that wrote to the bucket last
    std::int64_t start_ns = 0;          // for a trace; 0 if tracing is off
  };

  void build_buckets(const std::vector<std::size_t>& order);
  std::shared_ptr<const NeededElements> needed_of(const BucketState& bucket_state) const;
  Bucket make_bucket(std::size_t index, const std::vector<std::size_t>& gradients) const;
  void restore_layout(const std::string& layout);
  std::vector<std::size_t> next_order() const;
  std::string layout() const;
  void add_to_bucket(std::size_t index);
  void copy_into_bucket(Placement& placement, GradientState& state);
  void start_full_buckets();
  void fill_buckets();
  void start_bucket(BucketState& bucket_state);
  static void synchronize_streams(BucketState& bucket_state);
  void agree_on_order();
  void reduce_flags();
  std::vector<at::Tensor> reduce_late();
  template <typename F>
  void call_hook(F&& call);
  void finish_buckets();
  static void trace(const BucketState& bucket_state, std::int64_t wait_start_ns);
  void deliver(GradientSink& sink, const std::vector<at::Tensor>& late);
  void update_usage();
  bool is_fresh_on_any_rank(std::size_t index) const { return has_dense(index) || has_sparse(index); }
  bool has_dense(std::size_t index) const { return flag(index); }
  bool has_sparse(std::size_t index) const { return flag(specs_.size() + index); }
  bool flag(std::size_t at) const { return flags_.const_data_ptr<std::uint8_t>()[at] != 0; }

  const ReducerOptions options_;
  const at::Tensor gradient_scale_;  // gradients are multiplied by this before they are added
  const double sum_scale_;           // sums are multiplied by this

  std::vector<Placement> placements_;
  std::vector<BucketState> buckets_;
  std::vector<std::size_t> order_;  // of the gradients in buckets; in the first reduction, as this rank computed them
  std::uint64_t layout_hash_ = 0;   // 0 before the buckets are laid out

  std::vector<GradientState> states_;
  std::size_t next_bucket_ = 0;  // the first bucket that has not started
  bool is_finishing_ = false;
  std::vector<std::vector<ElementRange>> needed_;  // by host and gradient; empty: all
  at::Tensor flags_;
};

}  // namespace lockstep::comm::reducers
