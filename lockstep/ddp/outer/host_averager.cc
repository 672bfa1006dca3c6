// A mean flattens tensors into buckets, which are exchanged and copied back.
#include "lockstep/ddp/outer/host_averager.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::ddp::inline outer {
namespace {

using checkpoint::StateDict;
using checkpoint::value_of;

constexpr std::size_t kBucketBytes = 25 << 20;

// Names in the state.
constexpr const char* kReductions = "reductions";
constexpr const char* kSteps = "steps";
constexpr const char* kHasBegun = "outer";

int warm_up_of(const OuterMethod& method) {
  int warm_up = 0;
  std::visit(
      [&](const auto& options) {
        if constexpr (requires { options.warm_up; }) warm_up = options.warm_up;
      },
      method);
  return warm_up;
}

}  // namespace

HostAverager::HostAverager(int period, OuterMethod method, HostExchange exchange, Store store)
    : period_(period), warm_up_(warm_up_of(method)), exchange_(std::move(exchange)), store_(std::move(store)) {
  if (!std::holds_alternative<std::monostate>(method)) outer_.emplace(method, exchange_, store_);
}

void HostAverager::average(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
                           bool buffers_equal_on_host) {
  const at::NoGradGuard no_grad;
  const bool has_trained = num_reductions_ > 0;
  num_steps_ += std::exchange(num_reductions_, 0);
  if (!outer_ || !outer_->has_begun()) {
    take_mean(parameters, true);
    if (outer_ && has_trained && !is_warming_up()) outer_->begin(parameters);
  } else if (has_trained) {
    outer_->round(parameters);
  }
  take_mean(buffers, buffers_equal_on_host);
}

void HostAverager::take_mean(const std::vector<at::Tensor>& tensors, bool equal_on_host) const {
  if (!exchange_.average) return;
  struct Bucket {
    std::vector<at::Tensor> tensors;
    std::size_t bytes = 0;
  };
  std::vector<Bucket> buckets;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_floating_point() && !tensor.is_complex()) continue;
    const auto bucket = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket& open) {
      const at::Tensor& other = open.tensors.front();
      return other.scalar_type() == tensor.scalar_type() && other.device() == tensor.device() &&
             open.bytes + tensor.nbytes() <= kBucketBytes;
    });
    Bucket& into = bucket != buckets.end() ? *bucket : buckets.emplace_back();
    into.tensors.push_back(tensor);
    into.bytes += tensor.nbytes();
  }
  for (const Bucket& bucket : buckets) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : bucket.tensors) parts.push_back(tensor.detach().reshape({-1}));
    const at::Tensor flat = at::cat(parts);
    exchange_.average(flat.is_complex() ? at::view_as_real(flat).flatten() : flat, equal_on_host);
    std::int64_t first = 0;
    for (const at::Tensor& tensor : bucket.tensors) {
      store_(flat.narrow(0, first, tensor.numel()).view(tensor.sizes()), tensor);
      first += tensor.numel();
    }
  }
}

std::vector<at::Tensor> HostAverager::swap_in_copy(const std::vector<at::Tensor>& parameters) {
  if (!outer_)
    throw base::UsageError("the hosts keep no common copy of the parameters: there is no outer optimizer",
                           "set DdpOptions.outer, or call average_hosts() before an evaluation");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  for (const at::Tensor& parameter : parameters) own.push_back(parameter.detach().clone());
  if (outer_->has_begun()) outer_->store_copy(parameters);  // before, the hosts are equal
  return own;
}

void HostAverager::put_back(const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < own.size(); ++i) store_(own[i], parameters[i]);
}

StateDict HostAverager::state_dict() const {
  const bool has_begun = outer_ && outer_->has_begun();
  StateDict state = has_begun ? outer_->state_dict() : StateDict();
  state[kHasBegun] = has_begun;
  state[kReductions] = num_reductions_;
  state[kSteps] = num_steps_;
  return state;
}

void HostAverager::load_state_dict(const StateDict& state, const std::vector<at::Tensor>& parameters) {
  if (!state.contains(kReductions)) return;  // saved by a training whose hosts did not train apart
  const auto reductions = value_of<std::int64_t>(state, kReductions), steps = value_of<std::int64_t>(state, kSteps);
  if (value_of<bool>(state, kHasBegun)) {
    if (!outer_)
      throw base::UsageError("the checkpoint has the state of an outer optimizer; expected DdpOptions.outer",
                             "set the option as in the saved training");
    outer_->load_state_dict(state, parameters);
  }
  num_reductions_ = reductions;
  num_steps_ = steps;
}

std::vector<int> first_ranks_of_hosts(const comm::Group& group, const comm::Group& inside) {
  const at::Tensor first = at::full({1}, group.rank(), at::kInt);
  inside.broadcast(first, 0, {.name = "first rank of the host"});
  const at::Tensor all = at::empty({group.size()}, at::kInt);
  group.all_gather(all, first, {.name = "hosts of the ranks"});
  return {all.const_data_ptr<int>(), all.const_data_ptr<int>() + all.numel()};
}

HostLink::HostLink(const comm::Group& group)
    : group_(group.split(0)), inside_(group_.split_by_host()), across_(inside_) {
  const std::vector<int> hosts = first_ranks_of_hosts(group_, inside_);
  place_.weights.clear();
  place_.num_hosts = 0;
  place_.num_slices = group_.size();
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (hosts[static_cast<std::size_t>(rank)] != rank) continue;
    const auto ranks = static_cast<int>(std::count(hosts.begin(), hosts.end(), rank));
    if (rank == hosts[static_cast<std::size_t>(group_.rank())]) place_.host = place_.num_hosts;
    place_.weights.push_back(static_cast<float>(ranks) / static_cast<float>(group_.size()));
    place_.num_slices = std::min(place_.num_slices, ranks);
    ++place_.num_hosts;
  }
  place_.slice = inside_.rank();
  across_ = group_.split(std::min(place_.slice, place_.num_slices), place_.host);
}

HostExchange HostLink::exchange(at::ScalarType wire_dtype) const {
  HostExchange exchange = place_;
  if (inside_.size() > 1)
    exchange.share = [group = inside_, slices = place_.num_slices](const at::Tensor& flat) {
      const std::int64_t slice = flat.numel() / slices;
      for (int i = 0; i < slices; ++i) group.broadcast(flat.narrow(0, i * slice, slice), i, {.name = "outer slice"});
    };
  if (!has_several_hosts()) return exchange;
  exchange.average = [group = group_, wire_dtype](const at::Tensor& flat, bool) {
    group.all_reduce(
        flat, comm::ReduceOp::kMean,
        {.name = "average_hosts", .wire_dtype = flat.scalar_type() == at::kFloat ? wire_dtype : at::kFloat});
  };
  const auto wait_for = [](comm::Work work) {
    return [work = std::make_shared<comm::Work>(work)] {
      work->wait();  // bounded: by the timeout of the group
    };
  };
  exchange.all_to_all = [group = across_, wait_for](const at::Tensor& output, const at::Tensor& input) {
    return wait_for(group.all_to_all_async(output, input, {.name = "outer parts"}));
  };
  exchange.all_gather = [group = across_, wait_for](const at::Tensor& output, const at::Tensor& input) {
    return wait_for(group.all_gather_async(output, input, {.name = "outer means"}));
  };
  return exchange;
}

bool HostLink::any(bool value, const char* name) const {
  const at::Tensor flag = at::full({1}, value, at::kByte);
  group_.all_reduce(flag, comm::ReduceOp::kMax, {.name = name});
  return flag.item<std::uint8_t>() != 0;
}

}  // namespace lockstep::ddp::inline outer
