// What the exchanges between several ranks have in common: a channel, and a header that tells which step a rank is in.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/channel/channel.h"
#include "lockstep/comm/reducers/reduction_header.h"
#include "lockstep/comm/reducers/gradient_hook.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/reducers/straggler_detector.h"

namespace lockstep::comm {

/// The header, 64 bytes a rank, leaves with the exchange's beginning and is compared at its end, before anything is
/// delivered.
class HeadedExchange : public Exchange {
 public:
  bool all_have_begun() const override { return header_pending_->done(); }
  void abandon(const std::string& why) noexcept override { channel_->abandon(why); }

 protected:
  HeadedExchange(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel);

  /// Numbers the exchange and sends the header. `plan` must be equal on all ranks.
  void open(const StepIdentity& step, std::uint64_t plan, std::vector<Collective> along);
  /// Waits for all headers; fills attendance_ and what follows it. Once it has, it does nothing until the next open().
  /// Throws DesyncError.
  void check_header();
  /// The exchange is over, and nothing has failed.
  void closed_well();
  void start_along();
  void wait_along();

  Collective blank(Kind kind, std::string name) const;
  PendingPtr start(Collective op);
  void wait(Pending& pending, const std::string& what);
  Wire wire(const std::string& label);
  /// The mean of the ranks' sparse gradients of part `index`; undefined is none.
  at::Tensor sum_of_sparse(std::size_t index, const at::Tensor& mine);

  const std::string name_;
  const std::vector<Part> parts_;
  const std::unique_ptr<Channel> channel_;
  std::uint64_t seq_ = 0;
  const char* call_ = "";  // the user's, which began the exchange
  Attendance attendance_;
  bool company_ = false;   // this rank has joined
  double rescale_ = 1;     // what divide_by_active adds to the division by the world size
  int divisor_ = 1;        // both together: means are over this many ranks
  Use use_ = Use::kMeans;  // of the ranks that have not joined
  ExchangeStats stats_;

 private:
  std::size_t total_bytes_ = 0;  // of all parts
  std::uint64_t record_ = 0;     // of this exchange, in the flight recorder
  std::vector<Collective> along_;
  std::vector<PendingPtr> along_pending_;
  void look_for_stragglers(const std::vector<ExchangeHeader>& headers);

  using Clock = std::chrono::steady_clock;
  Clock::time_point closed_at_{};  // the exchange before
  std::uint32_t work_us_ = 0;      // from then to this rank's wait for the others
  Stragglers stragglers_;
  at::Tensor header_;
  at::Tensor headers_;
  PendingPtr header_pending_;
  bool header_checked_ = false;
};

}  // namespace lockstep::comm
