#include "lockstep/comm/reducers/in_place_gradient_reducer.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "lockstep/base/check.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/reducers/sparse_average.h"

namespace lockstep::comm {
namespace {

bool is_dense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

/// Strides without holes or overlaps, the same for all ranks.
std::vector<std::int64_t> strides_for(const at::Tensor& like) {
  if (like.is_non_overlapping_and_dense()) return like.strides().vec();
  const auto strides = c10::contiguous_strides(like.sizes());
  return {strides.begin(), strides.end()};
}

}  // namespace

DirectExchange::DirectExchange(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel,
                               std::unique_ptr<InPlaceReducer> reducer)
    : HeadedExchange(std::move(name), std::move(parts), std::move(channel)),
      reducer_(std::move(reducer)),
      states_(parts_.size()) {
  for (const Part& part : parts_) strides_.push_back(strides_for(part.like));
}

DirectExchange::~DirectExchange() {
  if (!open_) return;  // else others may still write to what was shown
  for (State& state : states_) keep_for_ever(std::move(state.mean));
}

void DirectExchange::begin(const StepIdentity& step, std::vector<Collective> along) {
  open(step, 0, std::move(along));  // throws after a failure, when what was shown must stay
  states_.assign(parts_.size(), {});
  shown_.clear();
  order_.clear();
  copied_.clear();
  stats_.started_early = 0;
  reducer_->open(step.use == Use::kMeans         ? Early::kReduce
                 : step.use == Use::kEarlyUpdate ? Early::kGive
                                                 : Early::kNothing);
  early_sink_ = nullptr;
  averaged_ = step.averaged;
  open_ = true;
}

/// Whether the others can add to `gradient` where it lies.
bool DirectExchange::lies_well(std::size_t index, const at::Tensor& gradient) const {
  return gradient.scalar_type() == parts_[index].like.scalar_type() &&
         gradient.strides() == at::IntArrayRef(strides_[index]) && reducer_->reaches(gradient.const_data_ptr()) &&
         !shown_.contains(gradient.const_data_ptr());
}

at::Tensor DirectExchange::ready(std::size_t index, const at::Tensor& gradient, bool fresh) {
  State& state = states_[index];
  LOCKSTEP_CHECK(!state.ready);
  state.ready = true;
  state.gradient = gradient;
  order_.push_back(index);
  ++stats_.started_early;
  if (early_sink_ && all_have_begun()) give_early();
  if (!is_dense(gradient)) {
    reducer_->show(index, nullptr, fresh);
    return {};
  }
  if (gradient.numel() == 0) return {};
  const bool staged = !lies_well(index, gradient);
  state.mean = staged ? reducer_->make_reachable(parts_[index].like, strides_[index]).copy_(gradient) : gradient;
  stats_.passes_in += staged;
  if (staged) copied_.push_back(index);
  stats_.bytes += static_cast<std::int64_t>(state.mean.nbytes());
  void* data = state.mean.mutable_data_ptr();
  shown_.insert(data);
  reducer_->show(index, data, fresh);
  return staged && fresh ? state.mean : at::Tensor();
}

/// Nothing is given before all ranks are known to be in the same update.
void DirectExchange::give_early() {
  check_header();
  if (attendance_.active == channel_->size()) reducer_->give_early(*early_sink_, divisor_);
  early_sink_ = nullptr;
}

Attendance DirectExchange::finish(Sink& sink) {
  return end([&] {
    reduce_all();
    wait_along();
    if (!company_) deliver(sink);
  });
}

Attendance DirectExchange::finish_pieces(PieceSink& sink) {
  return end([&] {
    if (use_ == Use::kMeans)  // this rank keeps company, and has no say
      reduce_all();
    else
      give_all(sink);
    wait_along();
  });
}

/// `work` is what is done with what all have shown, and waits for what goes along.
template <typename Work>
Attendance DirectExchange::end(const Work& work) {
  check_header();
  if (attendance_.active > 0) {
    start_along();
    work();
  }
  closed_well();
  open_ = false;
  states_.assign(parts_.size(), {});
  if (!copied_.empty() && !copies_reported_ && channel_->rank() == 0) report_copies();
  return attendance_;
}

void DirectExchange::report_copies() {
  copies_reported_ = true;
  base::log_info(std::to_string(copied_.size()) + " of " + std::to_string(parts_.size()) +
                 " gradients are copied before they are reduced, " + parts_[copied_.front()].name +
                 " first: other ranks cannot reach their memory, or their strides are not the parameter's, or two have "
                 "one memory");
}

void DirectExchange::give_all(PieceSink& sink) {
  ++stats_.operations;
  wait(*reducer_->finish_with(company_ ? nullptr : &sink, averaged_ ? 1 : divisor_, averaged_), name_);
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (reducer_->sparse(i)) refuse_sparse(parts_[i].name);
  if (company_ && use_ == Use::kNorm) return;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (reducer_->dense(i)) sink.taken(i);
}

void DirectExchange::reduce_all() {
  ++stats_.operations;
  wait(*reducer_->finish(), name_);
  if (reducer_->anybody_reads()) {
    read_missing();
    wait(*start(blank(Kind::kBarrier, name_)), name_);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!reducer_->sparse(i)) continue;
    State& state = states_[i];
    const at::Tensor sum =
        sum_of_sparse(i, state.gradient.defined() && !is_dense(state.gradient) ? state.gradient : at::Tensor());
    state.mean = state.mean.defined() ? state.mean.add_(sum) : sum;
  }
}

/// Parts that only other ranks have a dense gradient of.
void DirectExchange::read_missing() {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!reducer_->dense(i) || states_[i].mean.defined() || company_) continue;
    const at::Tensor& like = parts_[i].like;
    const auto options = like.options().requires_grad(false);
    const at::Tensor theirs = at::from_blob(const_cast<void*>(reducer_->mean(i)), like.sizes(), strides_[i], options);
    states_[i].mean = at::empty_strided(like.sizes(), strides_[i], options).copy_(theirs);
  }
}

void DirectExchange::deliver(Sink& sink) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!reducer_->dense(i) && !reducer_->sparse(i)) continue;
    if (rescale_ != 1) states_[i].mean.mul_(rescale_);
    sink.take(i, states_[i].mean);
  }
}

ExchangeStats DirectExchange::stats() const {
  ExchangeStats stats = stats_;
  stats.in_place = true;
  for (const std::size_t i : order_) stats.order.push_back(parts_[i].name);
  return stats;
}

}  // namespace lockstep::comm
