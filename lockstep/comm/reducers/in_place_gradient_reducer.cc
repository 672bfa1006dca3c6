#include "lockstep/comm/reducers/in_place_gradient_reducer.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "lockstep/base/check.h"
#include "lockstep/base/log.h"
#include "lockstep/base/telemetry/comm_time.h"
#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/reducers/sparse_average.h"
#include "lockstep/comm/shm/gradient_table.h"

namespace lockstep::comm::reducers {

InPlaceGradientReducer::InPlaceGradientReducer(std::string name, std::vector<GradientSpec> specs,
                                               std::unique_ptr<channel::Channel> channel,
                                               std::shared_ptr<shm::GradientTable> table)
    : ReducerBase(std::move(name), std::move(specs), std::move(channel)),
      table_(std::move(table)),
      states_(specs_.size()) {
  for (const GradientSpec& spec : specs_) strides_.push_back(reduced_strides(spec.example));
}

InPlaceGradientReducer::~InPlaceGradientReducer() {
  if (!open_) return;  // other ranks may still write to published gradients
  for (State& state : states_) arena::quarantine_tensor(std::move(state.mean));
}

void InPlaceGradientReducer::begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink* early_sink) {
  start_header(step, 0, std::move(extra_ops));  // throws after a failure; published gradients must then stay
  states_.assign(specs_.size(), {});
  published_.clear();
  order_.clear();
  copied_.clear();
  stats_.started_early = 0;
  table_->begin_round(step.use == GradientUse::kAverage            ? shm::EarlyWork::kReduce
                      : step.use == GradientUse::kUpdateInBackward ? shm::EarlyWork::kConsume
                                                                   : shm::EarlyWork::kNone);
  early_sink_ = early_sink;
  averaged_ = step.already_averaged;
  open_ = true;
}

/// Returns whether the other ranks can reduce `gradient` in place.
bool InPlaceGradientReducer::can_reduce_in_place(std::size_t index, const at::Tensor& gradient) const {
  return gradient.scalar_type() == specs_[index].example.scalar_type() &&
         gradient.strides() == at::IntArrayRef(strides_[index]) &&
         table_->is_peer_accessible(gradient.const_data_ptr()) && !published_.contains(gradient.const_data_ptr());
}

at::Tensor InPlaceGradientReducer::ready(std::size_t index, const at::Tensor& gradient, bool fresh) {
  const base::telemetry::CommTime::Scope time(channel_->size() > 1);
  State& state = states_[index];
  LOCKSTEP_CHECK(!state.ready);
  state.ready = true;
  state.gradient = gradient;
  order_.push_back(index);
  ++stats_.started_early;
  if (early_sink_ && has_begun_on_all_ranks()) consume_early();
  if (!is_strided(gradient)) {
    table_->publish(index, nullptr, fresh);
    return {};
  }
  if (gradient.numel() == 0) return {};
  const bool staged = !can_reduce_in_place(index, gradient);
  state.mean = staged ? table_->make_peer_accessible(specs_[index].example, strides_[index]).copy_(gradient) : gradient;
  stats_.copies_in += staged;
  if (staged) copied_.push_back(index);
  stats_.bytes += static_cast<std::int64_t>(state.mean.nbytes());
  void* data = state.mean.mutable_data_ptr();
  published_.insert(data);
  table_->publish(index, data, fresh);
  return staged && fresh ? state.mean : at::Tensor();
}

/// Passes the sink on only after the comparison of headers: all ranks then run the same update.
void InPlaceGradientReducer::consume_early() {
  wait_for_headers();
  if (participation_.active == channel_->size()) table_->consume_early(*early_sink_, divisor_);
  early_sink_ = nullptr;
}

Participation InPlaceGradientReducer::finish(GradientSink& sink) {
  wait_for_headers();
  if (participation_.active > 0) {
    start_extra_ops();
    reduce_all();
    wait_extra_ops();
    if (!is_shadow_) deliver(sink);
  }
  return end_round();
}

Participation InPlaceGradientReducer::finish_fused(ChunkSink& sink) {
  wait_for_headers();
  if (participation_.active == 0) return end_round();
  start_extra_ops();
  if (use_ == GradientUse::kAverage) {  // this rank has joined; the use is that of the other ranks
    reduce_all();
  } else {
    ++stats_.operations;
    wait(*table_->finish_consuming(is_shadow_ ? nullptr : &sink, averaged_ ? 1 : divisor_, averaged_), name_);
    const std::vector<shm::GradientPresence>& presence = table_->presence();
    for (std::size_t i = 0; i < specs_.size(); ++i)
      if (presence[i].sparse) throw_sparse_gradient(specs_[i].name);
    for (std::size_t i = 0; i < specs_.size(); ++i)
      if (presence[i].dense && !(is_shadow_ && use_ == GradientUse::kNorm)) sink.finish_gradient(i);
  }
  wait_extra_ops();
  return end_round();
}

SharedAllocation InPlaceGradientReducer::allocate_shared(std::size_t bytes) { return table_->allocate_shared(bytes); }

Participation InPlaceGradientReducer::end_round() {
  finish_reduction();
  open_ = false;
  states_.assign(specs_.size(), {});
  if (!copied_.empty() && !has_reported_copies_ && channel_->rank() == 0) report_copies();
  return participation_;
}

void InPlaceGradientReducer::report_copies() {
  has_reported_copies_ = true;
  base::log_info(
      std::to_string(copied_.size()) + " of " + std::to_string(specs_.size()) +
      " gradients are copied before they are reduced, " + specs_[copied_.front()].name +
      " first: other ranks cannot access their memory, their strides are not the parameter's, or two of them share "
      "memory");
}

void InPlaceGradientReducer::reduce_all() {
  ++stats_.operations;
  wait(*table_->finish(), name_);
  if (table_->has_remote_readers()) {
    read_peer_means();
    wait(*start(make_op(CollectiveKind::kBarrier, name_)), name_);
  }
  const std::vector<shm::GradientPresence>& presence = table_->presence();
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!presence[i].sparse) continue;
    State& state = states_[i];
    const at::Tensor sum =
        average_sparse(i, state.gradient.defined() && !is_strided(state.gradient) ? state.gradient : at::Tensor());
    state.mean = state.mean.defined() ? state.mean.add_(sum) : sum;
  }
}

/// Copies the means of gradients that only other ranks have published.
void InPlaceGradientReducer::read_peer_means() {
  const std::vector<shm::GradientPresence>& presence = table_->presence();
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!presence[i].dense || states_[i].mean.defined() || is_shadow_) continue;
    const at::Tensor& example = specs_[i].example;
    const auto options = example.options().requires_grad(false);
    const at::Tensor theirs = at::from_blob(const_cast<void*>(table_->mean(i)), example.sizes(), strides_[i], options);
    states_[i].mean = at::empty_strided(example.sizes(), strides_[i], options).copy_(theirs);
  }
}

void InPlaceGradientReducer::deliver(GradientSink& sink) {
  const std::vector<shm::GradientPresence>& presence = table_->presence();
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!presence[i].dense && !presence[i].sparse) continue;
    if (active_scale_ != 1) states_[i].mean.mul_(active_scale_);
    sink.consume(i, states_[i].mean);
  }
}

ReducerStats InPlaceGradientReducer::stats() const {
  ReducerStats stats = stats_;
  stats.in_place = true;
  for (const std::size_t i : order_) stats.order.push_back(specs_[i].name);
  return stats;
}

}  // namespace lockstep::comm::reducers
