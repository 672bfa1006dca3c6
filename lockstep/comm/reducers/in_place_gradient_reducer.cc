#include "lockstep/comm/reducers/in_place_gradient_reducer.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "lockstep/base/check.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/reducers/sparse_average.h"

namespace lockstep::comm {
namespace {

bool is_strided(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

/// Strides without holes or overlaps, the same for all ranks.
std::vector<std::int64_t> strides_for(const at::Tensor& like) {
  if (like.is_non_overlapping_and_dense()) return like.strides().vec();
  const auto strides = c10::contiguous_strides(like.sizes());
  return {strides.begin(), strides.end()};
}

}  // namespace

InPlaceGradientReducer::InPlaceGradientReducer(std::string name, std::vector<Part> parts,
                                               std::unique_ptr<Channel> channel,
                                               std::unique_ptr<PeerMemoryReducer> reducer)
    : ReducerBase(std::move(name), std::move(parts), std::move(channel)),
      reducer_(std::move(reducer)),
      states_(specs_.size()) {
  for (const Part& spec : specs_) strides_.push_back(strides_for(spec.like));
}

InPlaceGradientReducer::~InPlaceGradientReducer() {
  if (!open_) return;  // else others may still write to what was shown
  for (State& state : states_) quarantine_tensor(std::move(state.mean));
}

void InPlaceGradientReducer::begin(const StepIdentity& step, std::vector<Collective> extra_ops) {
  open(step, 0, std::move(extra_ops));  // throws after a failure, when what was shown must stay
  states_.assign(specs_.size(), {});
  published_.clear();
  order_.clear();
  copied_.clear();
  stats_.started_early = 0;
  reducer_->open(step.use == GradientUse::kAverage            ? EarlyWork::kReduce
                 : step.use == GradientUse::kUpdateInBackward ? EarlyWork::kConsume
                                                              : EarlyWork::kNone);
  early_sink_ = nullptr;
  averaged_ = step.already_averaged;
  open_ = true;
}

/// Whether the others can add to `gradient` where it lies.
bool InPlaceGradientReducer::can_reduce_in_place(std::size_t index, const at::Tensor& gradient) const {
  return gradient.scalar_type() == specs_[index].like.scalar_type() &&
         gradient.strides() == at::IntArrayRef(strides_[index]) &&
         reducer_->is_peer_accessible(gradient.const_data_ptr()) && !published_.contains(gradient.const_data_ptr());
}

at::Tensor InPlaceGradientReducer::ready(std::size_t index, const at::Tensor& gradient, bool fresh) {
  State& state = states_[index];
  LOCKSTEP_CHECK(!state.ready);
  state.ready = true;
  state.gradient = gradient;
  order_.push_back(index);
  ++stats_.started_early;
  if (early_sink_ && has_begun_on_all_ranks()) consume_early();
  if (!is_strided(gradient)) {
    reducer_->show(index, nullptr, fresh);
    return {};
  }
  if (gradient.numel() == 0) return {};
  const bool staged = !can_reduce_in_place(index, gradient);
  state.mean = staged ? reducer_->make_peer_accessible(specs_[index].like, strides_[index]).copy_(gradient) : gradient;
  stats_.copies_in += staged;
  if (staged) copied_.push_back(index);
  stats_.bytes += static_cast<std::int64_t>(state.mean.nbytes());
  void* data = state.mean.mutable_data_ptr();
  published_.insert(data);
  reducer_->show(index, data, fresh);
  return staged && fresh ? state.mean : at::Tensor();
}

/// Nothing is given before all ranks are known to be in the same update.
void InPlaceGradientReducer::consume_early() {
  wait_for_headers();
  if (participation_.active == channel_->size()) reducer_->consume_early(*early_sink_, divisor_);
  early_sink_ = nullptr;
}

Participation InPlaceGradientReducer::finish(GradientSink& sink) {
  return end([&] {
    reduce_all();
    wait_extra_ops();
    if (!is_shadow_) deliver(sink);
  });
}

Participation InPlaceGradientReducer::finish_fused(ChunkSink& sink) {
  return end([&] {
    if (use_ == GradientUse::kAverage)  // this rank keeps company, and has no say
      reduce_all();
    else
      consume_all(sink);
    wait_extra_ops();
  });
}

/// `work` is what is done with what all have shown, and waits for what goes along.
template <typename Work>
Participation InPlaceGradientReducer::end(const Work& work) {
  wait_for_headers();
  if (participation_.active > 0) {
    start_extra_ops();
    work();
  }
  finish_reduction();
  open_ = false;
  states_.assign(specs_.size(), {});
  if (!copied_.empty() && !has_reported_copies_ && channel_->rank() == 0) report_copies();
  return participation_;
}

void InPlaceGradientReducer::report_copies() {
  has_reported_copies_ = true;
  base::log_info(std::to_string(copied_.size()) + " of " + std::to_string(specs_.size()) +
                 " gradients are copied before they are reduced, " + specs_[copied_.front()].name +
                 " first: other ranks cannot reach their memory, or their strides are not the parameter's, or two have "
                 "one memory");
}

void InPlaceGradientReducer::consume_all(ChunkSink& sink) {
  ++stats_.operations;
  wait(*reducer_->finish_consuming(is_shadow_ ? nullptr : &sink, averaged_ ? 1 : divisor_, averaged_), name_);
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (reducer_->sparse(i)) throw_sparse_gradient(specs_[i].name);
  if (is_shadow_ && use_ == GradientUse::kNorm) return;
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (reducer_->dense(i)) sink.finish_gradient(i);
}

void InPlaceGradientReducer::reduce_all() {
  ++stats_.operations;
  wait(*reducer_->finish(), name_);
  if (reducer_->has_remote_readers()) {
    read_peer_means();
    wait(*start(make_op(CollectiveKind::kBarrier, name_)), name_);
  }
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!reducer_->sparse(i)) continue;
    State& state = states_[i];
    const at::Tensor sum =
        average_sparse(i, state.gradient.defined() && !is_strided(state.gradient) ? state.gradient : at::Tensor());
    state.mean = state.mean.defined() ? state.mean.add_(sum) : sum;
  }
}

/// Parts that only other ranks have a dense gradient of.
void InPlaceGradientReducer::read_peer_means() {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!reducer_->dense(i) || states_[i].mean.defined() || is_shadow_) continue;
    const at::Tensor& like = specs_[i].like;
    const auto options = like.options().requires_grad(false);
    const at::Tensor theirs = at::from_blob(const_cast<void*>(reducer_->mean(i)), like.sizes(), strides_[i], options);
    states_[i].mean = at::empty_strided(like.sizes(), strides_[i], options).copy_(theirs);
  }
}

void InPlaceGradientReducer::deliver(GradientSink& sink) {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!reducer_->dense(i) && !reducer_->sparse(i)) continue;
    if (active_scale_ != 1) states_[i].mean.mul_(active_scale_);
    sink.take(i, states_[i].mean);
  }
}

ReducerStats InPlaceGradientReducer::stats() const {
  ReducerStats stats = stats_;
  stats.in_place = true;
  for (const std::size_t i : order_) stats.order.push_back(specs_[i].name);
  return stats;
}

}  // namespace lockstep::comm
