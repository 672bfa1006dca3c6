// What the exchanges between several ranks have in common: a channel, and a header that tells which step a rank is in.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/channel/channel.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/reducers/gradient_hook.h"
#include "lockstep/comm/reducers/reduction_header.h"
#include "lockstep/comm/reducers/straggler_detector.h"

namespace lockstep::comm {

/// The header, 64 bytes a rank, leaves with the exchange's beginning and is compared at its end, before anything is
/// delivered.
class ReducerBase : public GradientReducer {
 public:
  bool has_begun_on_all_ranks() const override { return header_pending_->done(); }
  void abandon(const std::string& why) noexcept override { channel_->abandon(why); }

 protected:
  ReducerBase(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel);

  /// Numbers the exchange and sends the header. `plan` must be equal on all ranks.
  void open(const StepIdentity& step, std::uint64_t plan, std::vector<Collective> extra_ops);
  /// Waits for all headers; fills participation_ and what follows it. Once it has, it does nothing until the next
  /// open(). Throws DesyncError.
  void wait_for_headers();
  /// The exchange is over, and nothing has failed.
  void finish_reduction();
  void start_extra_ops();
  void wait_extra_ops();

  Collective make_op(CollectiveKind kind, std::string name) const;
  PendingPtr start(Collective op);
  void wait(Pending& pending, const std::string& what);
  HookContext wire(const std::string& label);
  /// The mean of the ranks' sparse gradients of part `index`; undefined is none.
  at::Tensor average_sparse(std::size_t index, const at::Tensor& mine);

  const std::string name_;
  const std::vector<Part> specs_;
  const std::unique_ptr<Channel> channel_;
  std::uint64_t seq_ = 0;
  const char* user_call_ = "";  // the user's, which began the exchange
  Participation participation_;
  bool is_shadow_ = false;                   // this rank has joined
  double active_scale_ = 1;                  // what divide_by_active adds to the division by the world size
  int divisor_ = 1;                          // both together: means are over this many ranks
  GradientUse use_ = GradientUse::kAverage;  // of the ranks that have not joined
  ReducerStats stats_;

 private:
  std::size_t total_bytes_ = 0;  // of all parts
  std::uint64_t record_ = 0;     // of this exchange, in the flight recorder
  std::vector<Collective> extra_ops_;
  std::vector<PendingPtr> extra_pending_;
  void detect_stragglers(const std::vector<ReductionHeader>& headers);

  using Clock = std::chrono::steady_clock;
  Clock::time_point finished_at_{};  // the exchange before
  std::uint32_t work_us_ = 0;        // from then to this rank's wait for the others
  StragglerDetector straggler_detector_;
  at::Tensor header_;
  at::Tensor headers_;
  PendingPtr header_pending_;
  bool header_checked_ = false;
};

}  // namespace lockstep::comm
