#include "lockstep/comm/reducers/reducer_base.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/reducers/sparse_average.h"

namespace lockstep::comm::reducers {

ReducerBase::ReducerBase(std::string name, std::vector<GradientSpec> specs, std::unique_ptr<channel::Channel> channel)
    : name_(std::move(name)),
      specs_(std::move(specs)),
      channel_(std::move(channel)),
      straggler_detector_(channel_->size()),
      header_(at::empty({sizeof(ReductionHeader)}, at::kByte)),
      headers_(at::empty({channel_->size() * static_cast<std::int64_t>(sizeof(ReductionHeader))}, at::kByte)) {
  for (const GradientSpec& spec : specs_) total_bytes_ += spec.example.nbytes();
}

namespace {

/// Returns at most one hour.
std::uint32_t microseconds(std::chrono::steady_clock::duration time) {
  return static_cast<std::uint32_t>(
      std::min<std::int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count(), 3'600'000'000));
}

}  // namespace

Collective ReducerBase::make_op(CollectiveKind kind, std::string name) const {
  return {.kind = kind, .name = std::move(name), .seq = seq_};
}

ChannelHookContext ReducerBase::hook_context(const std::string& label) { return {*channel_, label, seq_}; }

PendingPtr ReducerBase::start(Collective op) {
  ++stats_.operations;
  return channel_->start(op);
}

void ReducerBase::wait(Pending& pending, const std::string& what) {
  channel_->wait(pending, make_op(CollectiveKind::kAllReduce, what),
                 std::string(user_call_) + " (gradients of " + name_ + ", reduction " + std::to_string(seq_) + ")");
}

void ReducerBase::start_header(const StepIdentity& step, std::uint64_t layout_hash, std::vector<Collective> extra_ops) {
  base::telemetry::OperationStart what{.kind = "gradients", .name = name_, .bytes = total_bytes_};
  flight_id_ = channel_->begin(what);
  seq_ = what.seq;
  extra_ops_ = std::move(extra_ops);
  extra_pending_.clear();
  is_shadow_ = step.joined;
  user_call_ = step.use == GradientUse::kAverage || step.use == GradientUse::kUpdateInBackward ? "backward()"
               : step.use == GradientUse::kNorm && step.options_hash == 0                      ? "clip_grad_norm()"
                                                                                               : "step()";
  if (step.use != GradientUse::kNorm)
    base::telemetry::RankPage::this_process().gradient_reductions.fetch_add(1, std::memory_order_relaxed);
  ReductionHeader header = make_header(seq_, layout_hash, step);
  header.work_us = work_us_;
  std::memcpy(header_.mutable_data_ptr(), &header, sizeof header);
  Collective op = make_op(CollectiveKind::kAllGather, name_);
  op.input = header_;
  op.output = headers_;
  header_pending_ = start(op);
  header_checked_ = false;
}

void ReducerBase::wait_for_headers() {
  if (std::exchange(header_checked_, true)) return;
  const auto own_time = Clock::now() - finished_at_;
  work_us_ = finished_at_ == Clock::time_point{} ? 0 : microseconds(own_time);
  wait(*header_pending_, name_);
  std::vector<ReductionHeader> headers(static_cast<std::size_t>(channel_->size()));
  std::memcpy(headers.data(), headers_.const_data_ptr(), headers.size() * sizeof(ReductionHeader));
  if (const auto difference = find_mismatch(headers, channel_->members())) {
    try {
      throw base::DesyncError(base::Cause::kDesync, label(make_op(CollectiveKind::kAllReduce, name_)),
                              channel_->members()[static_cast<std::size_t>(channel_->rank())], difference->rank,
                              std::string(user_call_) + " on ranks that are not in the same step: " + difference->text,
                              difference->hint);
    } catch (const base::CommError& error) {
      channel_->fail(error);
    }
  }
  participation_ = {};
  bool by_active = false;
  for (std::size_t r = headers.size(); r-- > 0;) {
    by_active |= headers[r].divide_by_active != 0;
    participation_.stop_requested |= headers[r].stop_requested != 0;
    if (headers[r].joined) continue;
    ++participation_.active;
    participation_.first_active = static_cast<int>(r);
    use_ = static_cast<GradientUse>(headers[r].use);
  }
  divisor_ = by_active && participation_.active > 0 ? participation_.active : channel_->size();
  active_scale_ = static_cast<double>(channel_->size()) / divisor_;
  if (channel_->rank() == 0) detect_stragglers(headers);
}

void ReducerBase::detect_stragglers(const std::vector<ReductionHeader>& headers) {
  if (participation_.active < channel_->size()) return;  // a rank that has joined does no work
  std::vector<std::uint32_t> work;
  for (const ReductionHeader& header : headers) work.push_back(header.work_us);
  const auto found = straggler_detector_.add(work);
  if (!found) return;
  const int rank = channel_->members()[static_cast<std::size_t>(found->rank)];
  const auto generation = base::parse_int(base::Env::this_process().lockstep_generation.value_or("0"));
  job::Fatal warning = job::health::warning_of(*found, rank);
  warning.gen = static_cast<int>(generation.value_or(0));
  warning.step = base::telemetry::RankPage::this_process().step();
  base::log_warning(job::format_warning(warning));
}

void ReducerBase::finish_reduction() {
  if (participation_.active > 0) ++stats_.reductions;
  channel_->end(flight_id_);
  finished_at_ = Clock::now();
}

void ReducerBase::start_extra_ops() {
  for (Collective& op : extra_ops_) {
    if (op.kind == CollectiveKind::kBroadcast) op.root = participation_.first_active;
    op.seq = seq_;
    extra_pending_.push_back(start(op));
  }
}

void ReducerBase::wait_extra_ops() {
  for (std::size_t i = 0; i < extra_pending_.size(); ++i) wait(*extra_pending_[i], extra_ops_[i].name);
}

at::Tensor ReducerBase::average_sparse(std::size_t index, const at::Tensor& mine) {
  ChannelHookContext context = hook_context(specs_[index].name);
  stats_.operations += 3;
  return sum_sparse(mine, specs_[index].example, 1.0 / channel_->size(), context);
}

}  // namespace lockstep::comm::reducers
