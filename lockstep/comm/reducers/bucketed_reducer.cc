#include "lockstep/comm/reducers/bucketed_reducer.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>
#include <sstream>
#include <unordered_map>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/comm_time.h"
#include "lockstep/base/telemetry/span_log.h"
#include "lockstep/comm/reducers/bucket_plan.h"

namespace lockstep::comm::reducers {
namespace {

constexpr int kMaxUnusedReductions = 3;  // reductions without use after which a gradient loses its place
constexpr std::int64_t kAlign = 64;      // elements: gradients begin on cache lines

at::Tensor reciprocal(double divisor) {
  at::Tensor value = at::scalar_tensor(1.0 / divisor, at::kDouble);
  value.unsafeGetTensorImpl()->set_wrapped_number(true);  // so that it does not promote the gradient's dtype
  return value;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

/// Returns 0 if tracing is off.
std::int64_t time_for_trace() { return base::telemetry::SpanLog::this_process() ? base::monotonic_ns() : 0; }

}  // namespace

BucketedReducer::BucketedReducer(std::string name, std::vector<GradientSpec> specs,
                                 std::unique_ptr<channel::Channel> channel, ReducerOptions options)
    : ReducerBase(std::move(name), std::move(specs), std::move(channel)),
      options_(std::move(options)),
      gradient_scale_(
          reciprocal(options_.gradient_predivide_factor > 0 ? options_.gradient_predivide_factor : channel_->size())),
      sum_scale_(options_.gradient_predivide_factor > 0 ? options_.gradient_predivide_factor / channel_->size() : 1),
      placements_(specs_.size()),
      states_(specs_.size()),
      flags_(at::zeros({2 * static_cast<std::int64_t>(specs_.size())}, at::kByte)) {
  if (!options_.layout.empty()) restore_layout(options_.layout);
}

void BucketedReducer::begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink*) {
  if (layout_hash_ != 0)
    if (const auto order = next_order(); order != order_) build_buckets(order);
  states_.assign(specs_.size(), {});
  flags_.zero_();
  for (BucketState& bucket_state : buckets_) {
    bucket_state.missing = bucket_state.gradients.size();
    bucket_state.pending = nullptr;
    bucket_state.stream.reset();
  }
  if (layout_hash_ == 0) order_.clear();
  next_bucket_ = 0;
  is_finishing_ = false;
  stats_.started_early = 0;
  start_header(step, layout_hash_, std::move(extra_ops));
}

at::Tensor BucketedReducer::ready(std::size_t index, const at::Tensor& gradient, bool fresh) {
  const base::telemetry::CommTime::Scope time(channel_->size() > 1);
  GradientState& state = states_[index];
  LOCKSTEP_CHECK(!state.ready);
  state.ready = true;
  state.fresh = fresh;
  state.gradient = gradient;
  auto* flags = flags_.mutable_data_ptr<std::uint8_t>();
  if (fresh) flags[is_strided(gradient) ? index : specs_.size() + index] = 1;
  if (layout_hash_ == 0) {
    order_.push_back(index);
    return {};
  }
  const bool copied = fresh && is_strided(gradient) && placements_[index].bucket >= 0;
  add_to_bucket(index);
  start_full_buckets();
  return copied ? placements_[index].view : at::Tensor();
}

void BucketedReducer::add_to_bucket(std::size_t index) {
  Placement& placement = placements_[index];
  GradientState& state = states_[index];
  state.packed = true;
  if (placement.bucket < 0) return;
  synchronize_streams(buckets_[static_cast<std::size_t>(placement.bucket)]);
  if (!state.ready || !is_strided(state.gradient))
    placement.view.zero_();
  else
    copy_into_bucket(placement, state);
  --buckets_[static_cast<std::size_t>(placement.bucket)].missing;
}

void BucketedReducer::copy_into_bucket(Placement& placement, GradientState& state) {
  ++stats_.copies_in;
  if (same_memory(state.gradient, placement.view)) {
    if (!state.fresh) state.saved = placement.view.clone();
    placement.view.mul_(gradient_scale_);
  } else {
    at::mul_out(placement.view, state.gradient, gradient_scale_);
  }
  state.gradient = at::Tensor();
}

void BucketedReducer::start_full_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].missing == 0) start_bucket(buckets_[next_bucket_++]);
}

/// Makes the current stream wait for the stream that wrote to the bucket last. Autograd runs each node on the stream of
/// its forward, so gradients of one bucket may be written on several streams, and the bucket may start on another.
void BucketedReducer::synchronize_streams(BucketState& bucket_state) {
  const at::Device device = bucket_state.bucket.buffer.device();
  if (device.is_cpu()) return;
  const c10::Stream now = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (bucket_state.stream && *bucket_state.stream != now) {
    c10::Event written(device.type());
    written.record(*bucket_state.stream);
    written.block(now);
  }
  bucket_state.stream = now;
}

void BucketedReducer::start_bucket(BucketState& bucket_state) {
  synchronize_streams(bucket_state);
  Bucket& bucket = bucket_state.bucket;
  bucket_state.start_ns = time_for_trace();
  stats_.bytes += static_cast<std::int64_t>(bucket.buffer.nbytes());
  if (!is_finishing_) ++stats_.started_early;
  if (options_.hook) {
    ++stats_.operations;
    ChannelHookContext context = hook_context(bucket.names.front());
    call_hook([&] { bucket_state.pending = options_.hook->start(bucket, context); });
    return;
  }
  Collective op = make_all_reduce(bucket.names.front(), bucket.buffer);
  if (bucket.buffer.scalar_type() == at::kFloat) op.wire_dtype = options_.wire_dtype;
  op.needed = bucket_state.needed;
  bucket_state.pending = start(op);
}

Participation BucketedReducer::finish(GradientSink& sink) {
  const base::telemetry::CommTime::Scope time(channel_->size() > 1);
  is_finishing_ = true;
  const bool planned = layout_hash_ != 0;
  // A rank that has joined first reads in the headers whether any rank has gradients.
  if (planned && !is_shadow_) fill_buckets();
  wait_for_headers();
  if (participation_.active == 0) {
    finish_reduction();
    return participation_;
  }
  if (!planned) agree_on_order();
  fill_buckets();
  LOCKSTEP_CHECK(next_bucket_ == buckets_.size());
  start_extra_ops();
  reduce_flags();
  const std::vector<at::Tensor> late = reduce_late();
  finish_buckets();
  wait_extra_ops();
  deliver(sink, late);
  update_usage();
  finish_reduction();
  return participation_;
}

void BucketedReducer::fill_buckets() {
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (!states_[i].packed) add_to_bucket(i);
  start_full_buckets();
}

void BucketedReducer::agree_on_order() {
  const auto count = static_cast<std::int64_t>(specs_.size());
  // First the position of each gradient in this rank's order (-1: none), then whether each gradient is sparse.
  at::Tensor mine = at::full({2 * count}, -1, at::kInt);
  auto* mine_data = mine.mutable_data_ptr<std::int32_t>();
  for (std::size_t position = 0; position < order_.size(); ++position)
    mine_data[order_[position]] = static_cast<std::int32_t>(position);
  for (std::size_t i = 0; i < specs_.size(); ++i)
    mine_data[specs_.size() + i] = states_[i].ready && !is_strided(states_[i].gradient);
  at::Tensor all = at::empty({channel_->size() * 2 * count}, at::kInt);
  wait(*start(make_op(CollectiveKind::kAllGather, name_, mine, all)), name_);
  std::vector<std::vector<std::size_t>> orders;
  for (int r = 0; r < channel_->size(); ++r) {
    const auto* theirs = all.const_data_ptr<std::int32_t>() + r * 2 * count;
    std::vector<std::pair<std::int32_t, std::size_t>> placed;
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (theirs[i] >= 0) placed.emplace_back(theirs[i], i);
      if (theirs[specs_.size() + i] > 0) placements_[i].sparse = true;
    }
    std::sort(placed.begin(), placed.end());
    orders.emplace_back();
    for (const auto& [position, index] : placed) orders.back().push_back(index);
  }
  build_buckets(merge_orders(orders, specs_.size()));
  for (BucketState& bucket_state : buckets_) bucket_state.missing = bucket_state.gradients.size();
}

void BucketedReducer::build_buckets(const std::vector<std::size_t>& order) {
  std::vector<GradientSize> sizes;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  for (const GradientSpec& spec : specs_) {
    const std::pair kind{spec.example.scalar_type(), spec.example.device()};
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    sizes.push_back({static_cast<std::int64_t>(spec.example.nbytes()), static_cast<int>(found - kinds.begin())});
    if (found == kinds.end()) kinds.push_back(kind);
  }
  order_.clear();
  for (const std::size_t i : order)
    if (!placements_[i].sparse) order_.push_back(i);
  for (Placement& placement : placements_) {
    placement.bucket = -1;
    placement.view = at::Tensor();
  }
  buckets_.clear();
  layout_hash_ = layout_hash_ * 31 + 17;
  for (auto& members : plan_buckets(sizes, order_, options_.bucket_bytes)) {
    BucketState bucket_state;
    bucket_state.bucket = make_bucket(buckets_.size(), members);
    for (std::size_t k = 0; k < members.size(); ++k) {
      placements_[members[k]].bucket = static_cast<int>(buckets_.size());
      placements_[members[k]].view = bucket_state.bucket.gradient(k);
      layout_hash_ = (layout_hash_ ^ members[k]) * 1099511628211u;
    }
    bucket_state.gradients = std::move(members);
    bucket_state.needed = needed_of(bucket_state);
    buckets_.push_back(std::move(bucket_state));
  }
  if (!options_.hook) return;
  std::vector<Bucket> buckets;
  for (const BucketState& bucket_state : buckets_) buckets.push_back(bucket_state.bucket);
  call_hook([&] { options_.hook->buckets_changed(buckets); });
}

void BucketedReducer::set_needed(std::vector<std::vector<ElementRange>> needed) {
  needed_ = std::move(needed);
  for (BucketState& bucket_state : buckets_) bucket_state.needed = needed_of(bucket_state);
}

/// A gradient whose parameter has holes has other memory than the parameter: then all ranks get all of the bucket.
std::shared_ptr<const NeededElements> BucketedReducer::needed_of(const BucketState& bucket_state) const {
  if (needed_.empty()) return nullptr;
  auto by_host = std::make_shared<NeededElements>();
  for (const std::vector<ElementRange>& of_host : needed_) {
    std::vector<ElementRange>& ranges = by_host->emplace_back();
    for (std::size_t k = 0; k < bucket_state.gradients.size(); ++k) {
      const at::Tensor& example = specs_[bucket_state.gradients[k]].example;
      ElementRange range = of_host[bucket_state.gradients[k]];
      if (!example.is_non_overlapping_and_dense()) return nullptr;
      range.first += static_cast<std::size_t>(bucket_state.bucket.offsets[k]);
      if (range.count > 0) ranges.push_back(range);
    }
  }
  return by_host;
}

Bucket BucketedReducer::make_bucket(std::size_t index, const std::vector<std::size_t>& gradients) const {
  Bucket bucket{.index = index};
  std::int64_t total = 0;
  for (const std::size_t i : gradients) {
    const at::Tensor& example = specs_[i].example;
    bucket.names.push_back(specs_[i].name);
    bucket.shapes.push_back(example.sizes().vec());
    bucket.strides.push_back(reduced_strides(example));
    bucket.offsets.push_back(total);
    total += (example.numel() + kAlign - 1) / kAlign * kAlign;
  }
  bucket.buffer = at::zeros({total}, specs_[gradients.front()].example.options().requires_grad(false));
  return bucket;
}

// One line per gradient, in the order of the next reduction: the number of reductions for which no rank has had it, or
// -1 if it is sparse; then its name.
std::string BucketedReducer::layout() const {
  if (layout_hash_ == 0) return "";
  std::string text;
  for (const std::size_t i : next_order()) text += std::to_string(placements_[i].unused) + " " + specs_[i].name + "\n";
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (placements_[i].sparse) text += "-1 " + specs_[i].name + "\n";
  return text;
}

void BucketedReducer::restore_layout(const std::string& layout) {
  std::unordered_map<std::string, std::size_t> numbers;
  for (std::size_t i = 0; i < specs_.size(); ++i) numbers.emplace(specs_[i].name, i);
  std::vector<std::size_t> order;
  std::istringstream lines(layout);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.find(' ');
    const auto found = numbers.find(line.substr(space == std::string::npos ? line.size() : space + 1));
    if (found == numbers.end())
      throw base::UsageError("the bucket layout has the line " + base::quoted(line, 80) +
                             ", which names no gradient of this model, or names one twice; expected stats().layout of "
                             "the same model");
    const auto unused =
        base::parse_int_in_range("the bucket layout", line.substr(0, space), -1, std::numeric_limits<int>::max());
    if (unused < 0)
      placements_[found->second].sparse = true;
    else
      placements_[found->second].unused = static_cast<int>(unused);
    if (unused >= 0) order.push_back(found->second);
    numbers.erase(found);
  }
  build_buckets(order);
}

void BucketedReducer::reduce_flags() {
  Collective op = make_all_reduce(name_, flags_);
  op.op = ReduceOp::kMax;
  wait(*start(op), name_);
}

std::vector<at::Tensor> BucketedReducer::reduce_late() {
  std::vector<at::Tensor> late(specs_.size());
  std::vector<std::pair<std::size_t, PendingPtr>> pending;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (placements_[i].bucket >= 0 || !has_dense(i)) continue;
    const at::Tensor& mine = states_[i].gradient;
    late[i] = at::zeros_like(specs_[i].example, at::MemoryFormat::Contiguous).detach();
    if (mine.defined() && is_strided(mine)) {
      at::mul_out(late[i], mine, gradient_scale_);
      ++stats_.copies_in;
    }
    stats_.bytes += static_cast<std::int64_t>(late[i].nbytes());
    pending.emplace_back(i, start(make_all_reduce(specs_[i].name, late[i])));
  }
  for (const auto& [i, operation] : pending) {
    wait(*operation, specs_[i].name);
    if (sum_scale_ != 1) late[i].mul_(sum_scale_);
  }
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!has_sparse(i)) continue;
    const at::Tensor& mine = states_[i].gradient;
    const at::Tensor sum = average_sparse(i, mine.defined() && !is_strided(mine) ? mine : at::Tensor());
    late[i] = late[i].defined() ? late[i].add_(sum) : sum;
  }
  return late;
}

/// Calls a function of the hook. If it throws, this rank does not start the operations that the other ranks expect, so
/// the channel is closed on all ranks.
template <typename F>
void BucketedReducer::call_hook(F&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    abandon("the gradient hook " + options_.hook->name() + " failed: " + error.what());
    throw;
  }
}

void BucketedReducer::finish_buckets() {
  for (BucketState& bucket_state : buckets_) {
    const std::int64_t wait_start_ns = time_for_trace();
    wait(*bucket_state.pending, bucket_state.bucket.names.front());
    if (wait_start_ns != 0) trace(bucket_state, wait_start_ns);
    if (options_.hook) {
      ChannelHookContext context = hook_context(bucket_state.bucket.names.front());
      call_hook([&] { options_.hook->finish(bucket_state.bucket, context); });
    }
    if (sum_scale_ != 1) bucket_state.bucket.buffer.mul_(sum_scale_);
  }
}

void BucketedReducer::trace(const BucketState& bucket_state, std::int64_t wait_start_ns) {
  const std::string& name = bucket_state.bucket.names.front();
  const std::uint64_t bytes = bucket_state.bucket.buffer.nbytes();
  const std::int64_t now_ns = base::monotonic_ns();
  base::telemetry::SpanLog& log = *base::telemetry::SpanLog::this_process();
  if (bucket_state.start_ns != 0) log.add({"bucket", name, bytes, bucket_state.start_ns, now_ns});
  log.add({"wait", name, bytes, wait_start_ns, now_ns});
}

void BucketedReducer::deliver(GradientSink& sink, const std::vector<at::Tensor>& late) {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    Placement& placement = placements_[i];
    if (!is_fresh_on_any_rank(i)) {
      if (states_[i].saved.defined()) {
        placement.view.copy_(states_[i].saved);
        ++stats_.copies_out;
      }
      continue;
    }
    at::Tensor mean = late[i];
    if (placement.bucket >= 0 && has_dense(i)) mean = late[i].defined() ? placement.view.add_(late[i]) : placement.view;
    if (active_scale_ != 1) mean.mul_(active_scale_);
    const base::telemetry::CommTime::Pause computes;
    sink.consume(i, mean);
  }
  states_.assign(specs_.size(), {});
}

void BucketedReducer::update_usage() {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    placements_[i].unused = is_fresh_on_any_rank(i) ? 0 : placements_[i].unused + 1;
    if (has_sparse(i)) placements_[i].sparse = true;
  }
}

// Drops gradients that no rank has used lately, and adds those that were late and have no place.
std::vector<std::size_t> BucketedReducer::next_order() const {
  std::vector<std::size_t> order;
  for (const std::size_t i : order_)
    if (!placements_[i].sparse && placements_[i].unused < kMaxUnusedReductions) order.push_back(i);
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (placements_[i].bucket < 0 && !placements_[i].sparse && placements_[i].unused == 0 && stats_.reductions > 0 &&
        has_dense(i))
      order.push_back(i);
  return order;
}

ReducerStats BucketedReducer::stats() const {
  ReducerStats stats = stats_;
  for (const BucketState& bucket_state : buckets_)
    stats.bucket_bytes.push_back(static_cast<std::int64_t>(bucket_state.bucket.buffer.nbytes()));
  if (layout_hash_ != 0)
    for (const std::size_t i : order_) stats.order.push_back(specs_[i].name);
  stats.layout = layout();
  return stats;
}

}  // namespace lockstep::comm::reducers
