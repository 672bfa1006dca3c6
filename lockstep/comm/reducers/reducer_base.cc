#include "lockstep/comm/reducers/reducer_base.h"

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/comm_time.h"
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

struct HeaderField {
  std::int64_t (*value)(const ReductionHeader&);
  std::string (*text)(std::int64_t);  // continues "rank 0 "; null for a hash
  const char* hint;
  bool compares_joined = false;  // also compared with ranks that have joined
  std::string (*text_of_hashes)(const ReductionHeader&, const ReductionHeader&, const std::string& ranks) = nullptr;
};

std::string count_text(std::int64_t n, const char* singular, const char* plural) {
  return std::to_string(n) + " " + (n == 1 ? singular : plural);
}

/// Returns "the loaders of rank 0 and rank 1 have different seeds, batch sizes".
std::string loader_text(const ReductionHeader& a, const ReductionHeader& b, const std::string& ranks) {
  constexpr std::array kParts = {"seeds", "epochs", "batch sizes", "datasets, shuffle options or modes"};
  std::string parts;
  for (std::size_t i = 0; i < kParts.size(); ++i)
    if (((a.sample_order_parts ^ b.sample_order_parts) >> (4 * i) & 0xf) != 0)
      parts += (parts.empty() ? "" : ", ") + std::string(kParts[i]);
  return "the loaders of " + ranks + " have different " +
         (parts.empty() ? "seeds, epochs, batch sizes or datasets" : parts);
}

std::string optimizer_text(const ReductionHeader&, const ReductionHeader&, const std::string& ranks) {
  return "the optimizers of " + ranks +
         " have different options, such as the learning rate, or have made different numbers of steps";
}

constexpr std::array kUseTexts = {"averages gradients", "computes the norm of gradients", "updates parameters",
                                  "updates parameters in backward()"};

// The hints of several fields. Two common mistakes: a rank that skips a batch (an empty or broken one), and an
// optimizer that evaluates a closure until the loss of its own rank is small enough.
constexpr const char* kCountsHint =
    "every rank must call backward() and step() for each batch, or all must skip it; give the ranks equally many "
    "batches, or put the loop under lockstep::join(). An optimizer that calls a closure, such as LBFGS, needs the same "
    "loss on all ranks: all_reduce() it in the closure";
constexpr const char* kCallsHint = "make the same calls of the optimizer, with the same arguments, on all ranks";

const HeaderField kFields[] = {
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.seq); },
     [](std::int64_t v) { return "is in reduction " + std::to_string(v); }, kCountsHint, true},
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.layout_hash); },
     [](std::int64_t v) { return "has the bucket layout " + std::to_string(v); },
     "build the same model, with the same options, on all ranks", true},
    {[](const ReductionHeader& h) { return std::int64_t{h.batches}; },
     [](std::int64_t v) { return "has drawn " + count_text(v, "batch", "batches"); }, kCountsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.sample_order_hash}; }, nullptr,
     "pass the same dataset and the same options to make_loader() on all ranks, and iterate over the same epoch", false,
     loader_text},
    {[](const ReductionHeader& h) { return h.steps; },
     [](std::int64_t v) { return "has completed " + count_text(v, "step", "steps"); }, kCountsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.optimizer_steps}; },
     [](std::int64_t v) { return "has made " + count_text(v, "optimizer step", "optimizer steps"); }, kCountsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.use}; },
     [](std::int64_t v) { return std::string(kUseTexts.at(static_cast<std::size_t>(v))); }, kCallsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.local_backwards}; },
     [](std::int64_t v) { return "has called backward() " + count_text(v, "time", "times"); },
     "every rank must call step() after the same number of backward() calls, or all must skip it; put a backward() "
     "that only one rank calls, or that not all call equally often, under no_sync()"},
    {[](const ReductionHeader& h) { return std::int64_t{h.failed_backwards}; },
     [](std::int64_t v) { return "has had " + count_text(v, "backward() call", "backward() calls") + " fail"; },
     "if one rank catches an exception of backward(), the others must skip that batch as well"},
    {[](const ReductionHeader& h) { return std::int64_t{h.accumulating}; },
     [](std::int64_t v) { return std::string(v ? "accumulates into existing gradients" : "has fresh gradients"); },
     "call zero_grad() on all ranks alike; on all ranks, put the backward() calls that only accumulate under "
     "no_sync()"},
    {[](const ReductionHeader& h) { return std::int64_t{h.already_averaged}; },
     [](std::int64_t v) { return std::string(v ? "has averaged gradients" : "has local gradients"); }, kCallsHint},
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.options_hash); }, nullptr,
     "set the same options, and call step() equally often, on all ranks", false, optimizer_text},
};

/// Returns at most one hour.
std::uint32_t microseconds(std::chrono::steady_clock::duration time) {
  return static_cast<std::uint32_t>(
      std::min<std::int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count(), 3'600'000'000));
}

}  // namespace

ReductionHeader make_header(std::uint64_t seq, std::uint64_t layout_hash, const StepIdentity& step) {
  ReductionHeader header;
  std::memset(&header, 0, sizeof header);
  header.seq = seq;
  header.layout_hash = layout_hash;
  header.steps = step.steps;
  header.batches = static_cast<std::uint32_t>(step.batches);
  header.sample_order_hash = step.sample_order_hash;
  header.sample_order_parts = step.sample_order_parts;
  header.optimizer_steps = static_cast<std::uint32_t>(step.optimizer_steps);
  header.local_backwards = static_cast<std::uint32_t>(step.local_backwards);
  header.failed_backwards = static_cast<std::uint32_t>(step.failed_backwards);
  header.accumulating = step.accumulating;
  header.joined = step.joined;
  header.divide_by_active = step.divide_by_active;
  header.use = static_cast<std::uint8_t>(step.use);
  header.already_averaged = step.already_averaged;
  header.stop_requested = step.stop_requested;
  header.options_hash = step.options_hash;
  return header;
}

std::optional<HeaderMismatch> find_mismatch(const std::vector<ReductionHeader>& headers,
                                            const std::vector<int>& members) {
  for (const HeaderField& field : kFields) {
    std::optional<std::size_t> first;
    for (std::size_t i = 0; i < headers.size(); ++i) {
      if (headers[i].joined && !field.compares_joined) continue;
      if (!first) {
        first = i;
        continue;
      }
      const std::int64_t a = field.value(headers[*first]);
      const std::int64_t b = field.value(headers[i]);
      if (a == b) continue;
      const std::string first_rank = "rank " + std::to_string(members[*first]),
                        rank = "rank " + std::to_string(members[i]);
      return HeaderMismatch{members[i], members[*first],
                            field.text ? first_rank + " " + field.text(a) + ", " + rank + " " + field.text(b)
                                       : field.text_of_hashes(headers[*first], headers[i], first_rank + " and " + rank),
                            field.hint};
    }
  }
  return std::nullopt;
}

PendingPtr ChannelHookContext::all_reduce(const at::Tensor& tensor) {
  Collective op = op_;
  op.input = op.output = tensor;
  return channel_.start(op);
}

PendingPtr ChannelHookContext::all_reduce_int8(const at::Tensor& tensor, std::shared_ptr<ErrorFeedback> feedback) {
  const auto& wire_dtypes = channel_.transport().capabilities().wire_dtypes;
  if (std::find(wire_dtypes.begin(), wire_dtypes.end(), at::kChar) == wire_dtypes.end()) return nullptr;
  Collective op = op_;
  op.input = op.output = tensor;
  op.wire_dtype = at::kChar;
  op.error_feedback = std::move(feedback);
  return channel_.start(op);
}

PendingPtr ChannelHookContext::all_gather(const at::Tensor& output, const at::Tensor& input) {
  Collective op = op_;
  op.kind = CollectiveKind::kAllGather;
  op.input = input;
  op.output = output;
  return channel_.start(op);
}

void ChannelHookContext::wait(Pending& pending) {
  const base::telemetry::CommTime::Scope time(channel_.size() > 1);
  channel_.wait(pending, op_, "backward() (" + op_.name + ")");
}

std::vector<std::int64_t> reduced_strides(const at::Tensor& example) {
  if (example.is_non_overlapping_and_dense()) return example.strides().vec();
  const auto strides = c10::contiguous_strides(example.sizes());
  return {strides.begin(), strides.end()};
}

Collective ReducerBase::make_op(CollectiveKind kind, std::string name, at::Tensor input, at::Tensor output) const {
  return {.kind = kind, .name = std::move(name), .input = std::move(input), .output = std::move(output), .seq = seq_};
}

ChannelHookContext ReducerBase::hook_context(const std::string& label) { return {*channel_, label, seq_}; }

PendingPtr ReducerBase::start(Collective op) {
  ++stats_.operations;
  return channel_->start(op);
}

void ReducerBase::wait(Pending& pending, const std::string& what) {
  const base::telemetry::CommTime::Scope time(channel_->size() > 1);
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
  header_pending_ = start(make_op(CollectiveKind::kAllGather, name_, header_, headers_));
  header_checked_ = false;
}

void ReducerBase::wait_for_headers() {
  if (std::exchange(header_checked_, true)) return;
  const auto own_time = Clock::now() - finished_at_;
  work_us_ = finished_at_ == Clock::time_point{} ? 0 : microseconds(own_time);
  wait(*header_pending_, name_);
  std::vector<ReductionHeader> headers(static_cast<std::size_t>(channel_->size()));
  std::memcpy(headers.data(), headers_.const_data_ptr(), headers.size() * sizeof(ReductionHeader));
  if (const auto difference = find_mismatch(headers, channel_->members()))
    channel_->throw_failure(base::DesyncError(
        base::Cause::kDesync, label(make_op(CollectiveKind::kAllReduce, name_)),
        channel_->members()[static_cast<std::size_t>(channel_->rank())], difference->rank,
        std::string(user_call_) + " on ranks that are not in the same step: " + difference->text, difference->hint));
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
