#include "lockstep/ddp/hooks/int8_hook.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/comm/codec/int8.h"

namespace lockstep::ddp::inline hooks {
namespace {

using checkpoint::StateDict;
using checkpoint::value_of;

// Names in the state, after the number of a bucket.
constexpr const char* kNames = "/names";
constexpr const char* kSent = "/sent";
constexpr const char* kResult = "/result";
constexpr const char* kRank = "rank";
constexpr const char* kSize = "size";

/// Fills what lies between the gradients, which must stay finite.
void clear_gaps(comm::Bucket& bucket) {
  for (std::size_t k = 0; k < bucket.names.size(); ++k) {
    const std::int64_t end = bucket.offsets[k] + bucket.gradient(k).numel();
    bucket.buffer.slice(0, end, k + 1 < bucket.names.size() ? bucket.offsets[k + 1] : bucket.buffer.numel()).zero_();
  }
}

at::Tensor zeros_unless_defined(const at::Tensor& tensor) { return tensor.defined() ? tensor : at::zeros({0}); }

}  // namespace

void Int8Hook::buckets_changed(const std::vector<comm::Bucket>& buckets) {
  buckets_.clear();
  for (const comm::Bucket& bucket : buckets) {
    BucketState& state = buckets_.emplace_back();
    for (const std::string& name : bucket.names) state.names += name + "\n";
    state.feedback = std::make_shared<comm::ErrorFeedback>();
    state.sums = bucket.buffer.scalar_type() == at::kFloat
                     ? bucket.buffer
                     : at::zeros_like(bucket.buffer, bucket.buffer.options().dtype(at::kFloat));
    adopt_loaded(state);
  }
}

/// Copies, because a bucket may be made again before the state is used.
void Int8Hook::adopt_loaded(const BucketState& bucket) const {
  *bucket.feedback = {};
  const auto found = loaded_.find(bucket.names);
  if (found == loaded_.end()) return;
  if (found->second.sent.defined()) bucket.feedback->sent = found->second.sent.clone();
  if (found->second.result.defined()) bucket.feedback->result = found->second.result.clone();
}

comm::PendingPtr Int8Hook::start(comm::Bucket& bucket, comm::HookContext& context) {
  const at::NoGradGuard no_grad;
  BucketState& state = buckets_[bucket.index];
  if (is_loaded_ && (rank_ != context.rank() || size_ != context.size()))
    for (const BucketState& other : buckets_) *other.feedback = {};  // it is what another rank has lost
  rank_ = context.rank(), size_ = context.size();
  loaded_.clear();
  is_loaded_ = false;
  if (!state.sums.is_same(bucket.buffer)) state.sums.copy_(bucket.buffer);
  state.codes = state.all_codes = at::Tensor();
  if (auto pending = context.all_reduce_int8(state.sums, state.feedback)) return pending;
  return gather(state, context);
}

/// For a transport that does not round: gathers what each rank has rounded.
comm::PendingPtr Int8Hook::gather(BucketState& state, comm::HookContext& context) const {
  const std::int64_t count = state.sums.numel();
  const std::int64_t padded = (count + comm::codec::kInt8Block - 1) / comm::codec::kInt8Block * comm::codec::kInt8Block;
  at::Tensor& values = state.feedback->sent;
  if (!values.defined() || values.numel() != padded) values = at::zeros({padded}, at::kFloat);
  values.narrow(0, 0, count).add_(state.sums.to(at::kCPU));
  at::Tensor codes = at::empty({comm::codec::int8_bytes(padded)}, at::kByte);
  comm::codec::encode_int8(values.mutable_data_ptr<float>(), padded, codes.mutable_data_ptr<std::uint8_t>());
  state.codes = codes.to(state.sums.device());
  state.all_codes = at::empty({context.size() * codes.numel()}, state.codes.options());
  return context.all_gather(state.all_codes, state.codes);
}

void Int8Hook::finish(comm::Bucket& bucket, comm::HookContext& context) {
  const at::NoGradGuard no_grad;
  BucketState& state = buckets_[bucket.index];
  if (state.all_codes.defined()) {
    const at::Tensor all = state.all_codes.to(at::kCPU), sums = at::zeros_like(state.feedback->sent);
    for (int rank = 0; rank < context.size(); ++rank)  // in this order on all ranks
      comm::codec::add_int8(all.const_data_ptr<std::uint8_t>() + rank * state.codes.numel(), sums.numel(), 1,
                            sums.mutable_data_ptr<float>());
    state.sums.copy_(sums.narrow(0, 0, state.sums.numel()));
    state.codes = state.all_codes = at::Tensor();
  }
  if (!state.sums.is_same(bucket.buffer)) bucket.buffer.copy_(state.sums);
  if (!std::isfinite(state.sums.sum().item<float>())) {  // on all ranks alike
    is_finite_ = false;
    clear_gaps(bucket);
  }
  if (++num_finished_ < buckets_.size()) return;
  if (!is_finite_)
    for (const BucketState& other : buckets_) *other.feedback = {};
  num_finished_ = 0;
  is_finite_ = true;
}

StateDict Int8Hook::state_dict() const {
  StateDict state = {{kRank, rank_}, {kSize, size_}};
  std::size_t count = 0;
  const auto add = [&](const std::string& names, const comm::ErrorFeedback& feedback) {
    const std::string number = std::to_string(count++);
    state[number + kNames] = names;
    state[number + kSent] = zeros_unless_defined(feedback.sent);
    state[number + kResult] = zeros_unless_defined(feedback.result);
  };
  if (is_loaded_)
    for (const auto& [names, feedback] : loaded_) add(names, feedback);
  else
    for (const BucketState& bucket : buckets_) add(bucket.names, *bucket.feedback);
  return state;
}

void Int8Hook::load_state_dict(const StateDict& state) {
  std::map<std::string, comm::ErrorFeedback> loaded;
  const std::int64_t rank = value_of<std::int64_t>(state, kRank), size = value_of<std::int64_t>(state, kSize);
  for (std::size_t i = 0; i < (state.size() - 2) / 3; ++i) {
    const std::string number = std::to_string(i);
    const auto tensor = [&](const char* name) {
      return value_of<at::Tensor>(state, number + name).to(at::kCPU, at::kFloat).flatten().clone();
    };
    loaded[value_of<std::string>(state, number + kNames)] = {.sent = tensor(kSent), .result = tensor(kResult)};
  }
  if (state.size() != 2 + 3 * loaded.size())
    throw base::UsageError("Int8Hook: the saved state has " + std::to_string(state.size()) +
                           " values; expected the state of an Int8Hook");
  loaded_ = std::move(loaded);
  rank_ = rank, size_ = size;
  is_loaded_ = true;
  for (const BucketState& bucket : buckets_) adopt_loaded(bucket);
}

}  // namespace lockstep::ddp::inline hooks
