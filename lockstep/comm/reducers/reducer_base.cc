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

namespace lockstep::comm {

HeadedExchange::HeadedExchange(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel)
    : name_(std::move(name)),
      parts_(std::move(parts)),
      channel_(std::move(channel)),
      stragglers_(channel_->size()),
      header_(at::empty({sizeof(ExchangeHeader)}, at::kByte)),
      headers_(at::empty({channel_->size() * static_cast<std::int64_t>(sizeof(ExchangeHeader))}, at::kByte)) {
  for (const Part& part : parts_) total_bytes_ += part.like.nbytes();
}

namespace {

/// An hour is as good as more.
std::uint32_t microseconds(std::chrono::steady_clock::duration time) {
  return static_cast<std::uint32_t>(
      std::min<std::int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count(), 3'600'000'000));
}

}  // namespace

Collective HeadedExchange::blank(Kind kind, std::string name) const {
  return {.kind = kind, .name = std::move(name), .seq = seq_};
}

Wire HeadedExchange::wire(const std::string& label) { return {*channel_, label, seq_}; }

PendingPtr HeadedExchange::start(Collective op) {
  ++stats_.operations;
  return channel_->start(op);
}

void HeadedExchange::wait(Pending& pending, const std::string& what) {
  channel_->wait(pending, blank(Kind::kAllReduce, what),
                 std::string(call_) + " (gradients of " + name_ + ", exchange " + std::to_string(seq_) + ")");
}

void HeadedExchange::open(const StepIdentity& step, std::uint64_t plan, std::vector<Collective> along) {
  base::FlightNote what{.kind = "gradients", .name = name_, .bytes = total_bytes_};
  record_ = channel_->begin(what);
  seq_ = what.seq;
  along_ = std::move(along);
  along_pending_.clear();
  company_ = step.joined;
  call_ = step.use == Use::kMeans || step.use == Use::kEarlyUpdate ? "backward()"
          : step.use == Use::kNorm && step.options == 0            ? "clip_grad_norm()"
                                                                   : "step()";
  if (step.use != Use::kNorm) base::RankPage::process().exchanges.fetch_add(1, std::memory_order_relaxed);
  ExchangeHeader header = make_header(seq_, plan, step);
  header.work_us = work_us_;
  std::memcpy(header_.mutable_data_ptr(), &header, sizeof header);
  Collective op = blank(Kind::kAllGather, name_);
  op.input = header_;
  op.output = headers_;
  header_pending_ = start(op);
  header_checked_ = false;
}

void HeadedExchange::check_header() {
  if (std::exchange(header_checked_, true)) return;
  const auto worked = Clock::now() - closed_at_;
  work_us_ = closed_at_ == Clock::time_point{} ? 0 : microseconds(worked);
  wait(*header_pending_, name_);
  std::vector<ExchangeHeader> headers(static_cast<std::size_t>(channel_->size()));
  std::memcpy(headers.data(), headers_.const_data_ptr(), headers.size() * sizeof(ExchangeHeader));
  if (const auto difference = find_difference(headers, channel_->members())) {
    try {
      throw base::DesyncError(base::Cause::kDesync, label(blank(Kind::kAllReduce, name_)),
                              channel_->members()[static_cast<std::size_t>(channel_->rank())], difference->rank,
                              std::string(call_) + " on ranks that are not in the same step: " + difference->text,
                              "a backward() that only some ranks call belongs under no_sync()");
    } catch (const base::CommError& error) {
      channel_->fail(error);
    }
  }
  attendance_ = {};
  bool by_active = false;
  for (std::size_t r = headers.size(); r-- > 0;) {
    by_active |= headers[r].divide_by_active != 0;
    attendance_.stop_requested |= headers[r].stop_requested != 0;
    if (headers[r].joined) continue;
    ++attendance_.active;
    attendance_.first = static_cast<int>(r);
    use_ = static_cast<Use>(headers[r].use);
  }
  divisor_ = by_active && attendance_.active > 0 ? attendance_.active : channel_->size();
  rescale_ = static_cast<double>(channel_->size()) / divisor_;
  if (channel_->rank() == 0) look_for_stragglers(headers);
}

void HeadedExchange::look_for_stragglers(const std::vector<ExchangeHeader>& headers) {
  if (attendance_.active < channel_->size()) return;  // who has joined works no more
  std::vector<std::uint32_t> work;
  for (const ExchangeHeader& header : headers) work.push_back(header.work_us);
  const auto found = stragglers_.add(work);
  if (!found) return;
  const int rank = channel_->members()[static_cast<std::size_t>(found->rank)];
  const auto generation = base::parse_int(base::Env::process().lockstep_generation.value_or("0"));
  base::log_warning(describe(*found, rank, static_cast<int>(generation.value_or(0)), base::RankPage::process().step()));
}

void HeadedExchange::closed_well() {
  if (attendance_.active > 0) ++stats_.exchanges;
  channel_->end(record_);
  closed_at_ = Clock::now();
}

void HeadedExchange::start_along() {
  for (Collective& op : along_) {
    if (op.kind == Kind::kBroadcast) op.root = attendance_.first;
    op.seq = seq_;
    along_pending_.push_back(start(op));
  }
}

void HeadedExchange::wait_along() {
  for (std::size_t i = 0; i < along_pending_.size(); ++i) wait(*along_pending_[i], along_[i].name);
}

at::Tensor HeadedExchange::sum_of_sparse(std::size_t index, const at::Tensor& mine) {
  Wire way = wire(parts_[index].name);
  stats_.operations += 3;
  return sum_sparse(mine, parts_[index].like, 1.0 / channel_->size(), way);
}

}  // namespace lockstep::comm
