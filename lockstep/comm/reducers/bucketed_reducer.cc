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
#include "lockstep/base/telemetry/span_log.h"
#include "lockstep/comm/reducers/bucket_plan.h"

namespace lockstep::comm {
namespace {

constexpr int kPatience = 3;         // exchanges that a part may stay unused before it loses its place
constexpr std::int64_t kAlign = 64;  // elements: parts begin on cache lines

at::Tensor reciprocal(double divisor) {
  at::Tensor value = at::scalar_tensor(1.0 / divisor, at::kDouble);
  value.unsafeGetTensorImpl()->set_wrapped_number(true);  // does not promote the gradient's dtype
  return value;
}

bool is_dense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

/// 0 when nobody wants a trace.
std::int64_t time_for_trace() { return base::SpanLog::process() ? base::monotonic_ns() : 0; }

}  // namespace

PackingExchange::PackingExchange(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel,
                                 ExchangeOptions options)
    : HeadedExchange(std::move(name), std::move(parts), std::move(channel)),
      options_(std::move(options)),
      scale_(reciprocal(options_.predivide > 0 ? options_.predivide : channel_->size())),
      rest_(options_.predivide > 0 ? options_.predivide / channel_->size() : 1),
      places_(parts_.size()),
      states_(parts_.size()),
      flags_(at::zeros({2 * static_cast<std::int64_t>(parts_.size())}, at::kByte)) {
  if (!options_.layout.empty()) lay_out_as(options_.layout);
}

void PackingExchange::begin(const StepIdentity& step, std::vector<Collective> along) {
  relay_if_wanted();
  states_.assign(parts_.size(), {});
  flags_.zero_();
  for (Filling& filling : buckets_) {
    filling.missing = filling.parts.size();
    filling.pending = nullptr;
    filling.stream.reset();
  }
  if (plan_ == 0) order_.clear();
  next_ = 0;
  finishing_ = false;
  stats_.started_early = 0;
  open(step, plan_, std::move(along));
}

at::Tensor PackingExchange::ready(std::size_t index, const at::Tensor& gradient, bool fresh) {
  State& state = states_[index];
  LOCKSTEP_CHECK(!state.ready);
  state.ready = true;
  state.fresh = fresh;
  state.gradient = gradient;
  auto* flags = flags_.mutable_data_ptr<std::uint8_t>();
  if (fresh) flags[is_dense(gradient) ? index : parts_.size() + index] = 1;
  if (plan_ == 0) {
    order_.push_back(index);
    return {};
  }
  const bool moved = fresh && is_dense(gradient) && places_[index].bucket >= 0;
  pack(index);
  start_full_buckets();
  return moved ? places_[index].view : at::Tensor();
}

void PackingExchange::pack(std::size_t index) {
  Place& place = places_[index];
  State& state = states_[index];
  state.packed = true;
  if (place.bucket < 0) return;
  order_streams(buckets_[static_cast<std::size_t>(place.bucket)]);
  if (!state.ready || !is_dense(state.gradient))
    place.view.zero_();
  else
    write(place, state);
  --buckets_[static_cast<std::size_t>(place.bucket)].missing;
}

void PackingExchange::write(Place& place, State& state) {
  ++stats_.passes_in;
  if (same_memory(state.gradient, place.view)) {
    if (!state.fresh) state.saved = place.view.clone();
    place.view.mul_(scale_);
  } else {
    at::mul_out(place.view, state.gradient, scale_);
  }
  state.gradient = at::Tensor();
}

void PackingExchange::start_full_buckets() {
  while (next_ < buckets_.size() && buckets_[next_].missing == 0) start_bucket(buckets_[next_++]);
}

/// Autograd runs each node on the stream of its forward: gradients of one bucket may come on several, and it may leave
/// on another.
void PackingExchange::order_streams(Filling& filling) {
  const at::Device device = filling.bucket.buffer.device();
  if (device.is_cpu()) return;
  const c10::Stream now = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (filling.stream && *filling.stream != now) {
    c10::Event written(device.type());
    written.record(*filling.stream);
    written.block(now);
  }
  filling.stream = now;
}

void PackingExchange::start_bucket(Filling& filling) {
  order_streams(filling);
  Bucket& bucket = filling.bucket;
  filling.begun_ns = time_for_trace();
  stats_.bytes += static_cast<std::int64_t>(bucket.buffer.nbytes());
  if (!finishing_) ++stats_.started_early;
  if (options_.hook) {
    ++stats_.operations;
    Wire way = wire(bucket.names.front());
    filling.pending = options_.hook->start(bucket, way);
    return;
  }
  Collective op = blank(Kind::kAllReduce, bucket.names.front());
  op.input = op.output = bucket.buffer;
  if (bucket.buffer.scalar_type() == at::kFloat) op.wire = options_.wire;
  filling.pending = start(op);
}

Attendance PackingExchange::finish(Sink& sink) {
  finishing_ = true;
  const bool planned = plan_ != 0;
  // Who only keeps company learns from the header whether anybody has gradients.
  if (planned && !company_) fill_buckets();
  check_header();
  if (attendance_.active == 0) {
    closed_well();
    return attendance_;
  }
  if (!planned) agree_on_order();
  fill_buckets();
  LOCKSTEP_CHECK_EQ(next_, buckets_.size());
  start_along();
  exchange_flags();
  const std::vector<at::Tensor> late = exchange_late();
  finish_buckets();
  wait_along();
  deliver(sink, late);
  note_use();
  closed_well();
  return attendance_;
}

void PackingExchange::fill_buckets() {
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (!states_[i].packed) pack(i);
  start_full_buckets();
}

void PackingExchange::agree_on_order() {
  const auto count = static_cast<std::int64_t>(parts_.size());
  // Place of each part in this rank's order, -1 for none; then whether it was sparse.
  at::Tensor mine = at::full({2 * count}, -1, at::kInt);
  auto* told = mine.mutable_data_ptr<std::int32_t>();
  for (std::size_t place = 0; place < order_.size(); ++place) told[order_[place]] = static_cast<std::int32_t>(place);
  for (std::size_t i = 0; i < parts_.size(); ++i)
    told[parts_.size() + i] = states_[i].ready && !is_dense(states_[i].gradient);
  at::Tensor all = at::empty({channel_->size() * 2 * count}, at::kInt);
  Collective op = blank(Kind::kAllGather, name_);
  op.input = mine;
  op.output = all;
  wait(*start(op), name_);
  std::vector<std::vector<std::size_t>> orders;
  for (int r = 0; r < channel_->size(); ++r) {
    const auto* theirs = all.const_data_ptr<std::int32_t>() + r * 2 * count;
    std::vector<std::pair<std::int32_t, std::size_t>> placed;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (theirs[i] >= 0) placed.emplace_back(theirs[i], i);
      if (theirs[parts_.size() + i] > 0) places_[i].sparse = true;
    }
    std::sort(placed.begin(), placed.end());
    orders.emplace_back();
    for (const auto& [place, part] : placed) orders.back().push_back(part);
  }
  lay_out(agree_order(orders, parts_.size()));
  for (Filling& filling : buckets_) filling.missing = filling.parts.size();
}

void PackingExchange::lay_out(const std::vector<std::size_t>& order) {
  std::vector<PartSize> sizes;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  for (const Part& part : parts_) {
    const std::pair kind{part.like.scalar_type(), part.like.device()};
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    sizes.push_back({static_cast<std::int64_t>(part.like.nbytes()), static_cast<int>(found - kinds.begin())});
    if (found == kinds.end()) kinds.push_back(kind);
  }
  order_.clear();
  for (const std::size_t i : order)
    if (!places_[i].sparse) order_.push_back(i);
  for (Place& place : places_) {
    place.bucket = -1;
    place.view = at::Tensor();
  }
  buckets_.clear();
  plan_ = plan_ * 31 + 17;
  for (auto& members : plan_buckets(sizes, order_, options_.bucket_bytes)) {
    Filling filling;
    filling.bucket.index = buckets_.size();
    std::int64_t total = 0;
    std::vector<std::int64_t> offsets;
    for (const std::size_t i : members) {
      offsets.push_back(total);
      total += (parts_[i].like.numel() + kAlign - 1) / kAlign * kAlign;
      filling.bucket.names.push_back(parts_[i].name);
      plan_ = (plan_ ^ i) * 1099511628211u;
    }
    const at::Tensor& first = parts_[members.front()].like;
    filling.bucket.buffer = at::zeros({total}, first.options().requires_grad(false));
    for (std::size_t k = 0; k < members.size(); ++k) {
      const at::Tensor& like = parts_[members[k]].like;
      const at::Tensor memory = filling.bucket.buffer.narrow(0, offsets[k], like.numel());
      places_[members[k]].bucket = static_cast<int>(buckets_.size());
      places_[members[k]].view = like.is_non_overlapping_and_dense()
                                     ? memory.as_strided(like.sizes(), like.strides(), offsets[k])
                                     : memory.view(like.sizes());
    }
    filling.parts = std::move(members);
    buckets_.push_back(std::move(filling));
  }
  ++stats_.plans;
}

// A line a part, in the order of the next exchange: for how many exchanges nobody had a gradient of it, -1 when it has
// sparse ones; then its name.
std::string PackingExchange::layout() const {
  if (plan_ == 0) return "";
  std::string text;
  for (const std::size_t i : next_order()) text += std::to_string(places_[i].unused) + " " + parts_[i].name + "\n";
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (places_[i].sparse) text += "-1 " + parts_[i].name + "\n";
  return text;
}

void PackingExchange::lay_out_as(const std::string& layout) {
  std::unordered_map<std::string, std::size_t> numbers;
  for (std::size_t i = 0; i < parts_.size(); ++i) numbers.emplace(parts_[i].name, i);
  std::vector<std::size_t> order;
  std::istringstream lines(layout);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.find(' ');
    const auto found = numbers.find(line.substr(space == std::string::npos ? line.size() : space + 1));
    if (found == numbers.end())
      throw base::UsageError("the layout of buckets has the line " + base::quoted(line, 80) +
                             ", which names no gradient of this model, or one twice; allowed is what stats().layout of "
                             "the same model said");
    const auto unused =
        base::parse_int_in("the layout of buckets", line.substr(0, space), -1, std::numeric_limits<int>::max());
    if (unused < 0)
      places_[found->second].sparse = true;
    else
      places_[found->second].unused = static_cast<int>(unused);
    if (unused >= 0) order.push_back(found->second);
    numbers.erase(found);
  }
  lay_out(order);
}

void PackingExchange::exchange_flags() {
  Collective op = blank(Kind::kAllReduce, name_);
  op.op = ReduceOp::kMax;
  op.input = op.output = flags_;
  wait(*start(op), name_);
}

std::vector<at::Tensor> PackingExchange::exchange_late() {
  std::vector<at::Tensor> late(parts_.size());
  std::vector<std::pair<std::size_t, PendingPtr>> pending;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (places_[i].bucket >= 0 || !dense(i)) continue;
    const at::Tensor& mine = states_[i].gradient;
    late[i] = at::zeros_like(parts_[i].like, at::MemoryFormat::Contiguous).detach();
    if (mine.defined() && is_dense(mine)) {
      at::mul_out(late[i], mine, scale_);
      ++stats_.passes_in;
    }
    Collective op = blank(Kind::kAllReduce, parts_[i].name);
    op.input = op.output = late[i];
    stats_.bytes += static_cast<std::int64_t>(late[i].nbytes());
    pending.emplace_back(i, start(op));
  }
  for (const auto& [i, one] : pending) {
    wait(*one, parts_[i].name);
    if (rest_ != 1) late[i].mul_(rest_);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!sparse(i)) continue;
    const at::Tensor& mine = states_[i].gradient;
    const at::Tensor sum = sum_of_sparse(i, mine.defined() && !is_dense(mine) ? mine : at::Tensor());
    late[i] = late[i].defined() ? late[i].add_(sum) : sum;
  }
  return late;
}

void PackingExchange::finish_buckets() {
  for (Filling& filling : buckets_) {
    const std::int64_t waits_ns = time_for_trace();
    wait(*filling.pending, filling.bucket.names.front());
    if (waits_ns != 0) trace(filling, waits_ns);
    if (options_.hook) {
      Wire way = wire(filling.bucket.names.front());
      options_.hook->finish(filling.bucket, way);
    }
    if (rest_ != 1) filling.bucket.buffer.mul_(rest_);
  }
}

void PackingExchange::trace(const Filling& filling, std::int64_t waits_ns) {
  const std::string& name = filling.bucket.names.front();
  const std::uint64_t bytes = filling.bucket.buffer.nbytes();
  const std::int64_t now_ns = base::monotonic_ns();
  base::SpanLog& log = *base::SpanLog::process();
  if (filling.begun_ns != 0) log.add({"bucket", name, bytes, filling.begun_ns, now_ns});
  log.add({"wait", name, bytes, waits_ns, now_ns});
}

void PackingExchange::deliver(Sink& sink, const std::vector<at::Tensor>& late) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Place& place = places_[i];
    if (!any_fresh(i)) {
      if (states_[i].saved.defined()) {
        place.view.copy_(states_[i].saved);
        ++stats_.passes_out;
      }
      continue;
    }
    at::Tensor mean = late[i];
    if (place.bucket >= 0 && dense(i)) mean = late[i].defined() ? place.view.add_(late[i]) : place.view;
    if (rescale_ != 1) mean.mul_(rescale_);
    sink.take(i, mean);
  }
  states_.assign(parts_.size(), {});
}

void PackingExchange::note_use() {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    places_[i].unused = any_fresh(i) ? 0 : places_[i].unused + 1;
    if (sparse(i)) places_[i].sparse = true;
  }
}

void PackingExchange::relay_if_wanted() {
  if (plan_ == 0) return;
  const std::vector<std::size_t> order = next_order();
  if (order != order_) lay_out(order);
}

// Without parts that nobody has used for long, and with those that were late and have no place yet.
std::vector<std::size_t> PackingExchange::next_order() const {
  std::vector<std::size_t> order;
  for (const std::size_t i : order_) {
    const bool stays = !places_[i].sparse && places_[i].unused < kPatience;
    if (stays) order.push_back(i);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (places_[i].bucket < 0 && !places_[i].sparse && places_[i].unused == 0 && stats_.exchanges > 0 && dense(i))
      order.push_back(i);
  return order;
}

ExchangeStats PackingExchange::stats() const {
  ExchangeStats stats = stats_;
  for (const Filling& filling : buckets_)
    stats.bucket_bytes.push_back(static_cast<std::int64_t>(filling.bucket.buffer.nbytes()));
  if (plan_ != 0)
    for (const std::size_t i : order_) stats.order.push_back(parts_[i].name);
  stats.layout = layout();
  return stats;
}

}  // namespace lockstep::comm
