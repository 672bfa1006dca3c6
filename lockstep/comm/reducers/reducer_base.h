// ReducerBase: base class of reducers between several ranks, with a channel and a header that identifies the step.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/channel/channel.h"
#include "lockstep/comm/interface/gradient_hook.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/job/health/straggler_detector.h"

namespace lockstep::comm::reducers {

/// Sent as raw bytes between ranks of the same build.
struct ReductionHeader {
  std::uint64_t seq;          // of the reduction on its channel
  std::uint64_t layout_hash;  // hash of the layout of buckets
  std::int64_t steps;
  std::uint64_t options_hash;
  std::uint32_t batches;
  std::uint32_t optimizer_steps;
  std::uint32_t local_backwards;
  std::uint32_t failed_backwards;
  std::uint8_t accumulating;
  std::uint8_t joined;
  std::uint8_t divide_by_active;
  std::uint8_t use;
  std::uint8_t already_averaged;
  std::uint8_t stop_requested;
  std::uint16_t sample_order_parts;
  std::uint32_t work_us;  // time that this rank spent on its own before it waited in the previous reduction
  std::uint32_t sample_order_hash;
};
static_assert(sizeof(ReductionHeader) == 64);

ReductionHeader make_header(std::uint64_t seq, std::uint64_t layout_hash, const StepIdentity& step);

struct HeaderMismatch {
  int rank;          ///< the first rank that differs, as a world rank
  int other;         ///< the world rank that it differs from
  std::string text;  ///< "rank 0 has drawn 12 batches, rank 1 has drawn 13 batches"
  std::string hint;  ///< the remedy
};

/// Returns the first difference, or nothing if all ranks are in the same step. For ranks that have joined, only `seq`
/// and `layout_hash` are compared. `members` are the world ranks that the headers belong to. Pure.
std::optional<HeaderMismatch> find_mismatch(const std::vector<ReductionHeader>& headers,
                                            const std::vector<int>& members);

/// All operations have the number `seq` and the name `label`.
class ChannelHookContext final : public HookContext {
 public:
  ChannelHookContext(channel::Channel& channel, const std::string& label, std::uint64_t seq)
      : channel_(channel), op_{.kind = CollectiveKind::kAllReduce, .name = label, .seq = seq} {}
  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  PendingPtr all_reduce(const at::Tensor& tensor) override;
  PendingPtr all_reduce_int8(const at::Tensor& tensor, std::shared_ptr<ErrorFeedback> feedback) override;
  PendingPtr all_gather(const at::Tensor& output, const at::Tensor& input) override;
  void wait(Pending& pending) override;

 private:
  channel::Channel& channel_;
  Collective op_;
};

/// Returns the strides with which all ranks reduce a gradient: without holes or overlaps.
std::vector<std::int64_t> reduced_strides(const at::Tensor& example);

/// Returns whether `tensor` is dense (not sparse).
inline bool is_strided(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

/// start_header() starts an all_gather of the headers, 64 bytes per rank. wait_for_headers() compares them before any
/// mean is delivered.
class ReducerBase : public GradientReducer {
 public:
  bool has_begun_on_all_ranks() const override { return header_pending_->done(); }
  void abandon(const std::string& why) noexcept override { channel_->abandon(why); }

 protected:
  ReducerBase(std::string name, std::vector<GradientSpec> specs, std::unique_ptr<channel::Channel> channel);

  /// Numbers the reduction and starts the all_gather of headers. `layout_hash` must be equal on all ranks.
  void start_header(const StepIdentity& step, std::uint64_t layout_hash, std::vector<Collective> extra_ops);
  /// Blocks until all headers have arrived, compares them, and fills participation_, active_scale_, divisor_ and use_.
  /// Throws DesyncError. Later calls in the same reduction do nothing.
  void wait_for_headers();
  /// Ends the reduction without an error.
  void finish_reduction();
  void start_extra_ops();
  void wait_extra_ops();

  Collective make_op(CollectiveKind kind, std::string name, at::Tensor input = {}, at::Tensor output = {}) const;
  /// An all_reduce in place.
  Collective make_all_reduce(std::string name, const at::Tensor& tensor) const {
    return make_op(CollectiveKind::kAllReduce, std::move(name), tensor, tensor);
  }
  PendingPtr start(Collective op);
  void wait(Pending& pending, const std::string& what);
  ChannelHookContext hook_context(const std::string& label);
  /// Returns the mean of the ranks' sparse gradients `index`. `mine` is undefined if this rank has none.
  at::Tensor average_sparse(std::size_t index, const at::Tensor& mine);

  const std::string name_;
  const std::vector<GradientSpec> specs_;
  const std::unique_ptr<channel::Channel> channel_;
  std::uint64_t seq_ = 0;
  const char* user_call_ = "";  // the user's call that began the reduction
  Participation participation_;
  bool is_shadow_ = false;                   // this rank has joined
  double active_scale_ = 1;                  // factor that turns a mean over all ranks into one over the active ranks
  int divisor_ = 1;                          // number of ranks that means are over
  GradientUse use_ = GradientUse::kAverage;  // of the ranks that have not joined
  ReducerStats stats_;

 private:
  std::size_t total_bytes_ = 0;  // of all gradients
  std::uint64_t flight_id_ = 0;  // of this reduction, in the flight recorder
  std::vector<Collective> extra_ops_;
  std::vector<PendingPtr> extra_pending_;
  void detect_stragglers(const std::vector<ReductionHeader>& headers);

  using Clock = std::chrono::steady_clock;
  Clock::time_point finished_at_{};  // when the previous reduction ended
  std::uint32_t work_us_ = 0;        // from then until this rank waited for the other ranks
  job::health::StragglerDetector straggler_detector_;
  at::Tensor header_;
  at::Tensor headers_;
  PendingPtr header_pending_;
  bool header_checked_ = false;
};

}  // namespace lockstep::comm::reducers
