// Groups parameters into batches and runs one foreach update per batch.
#include "lockstep/optim/fused/foreach_pass.h"

#include <ATen/ATen.h>

#include <map>
#include <tuple>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/optim/kernels/foreach_update.h"

namespace lockstep::optim::inline fused {

ForeachPass::ForeachPass(const ParameterStorage& storage, UpdateRule& rule, bool sharded)
    : storage_(storage), rule_(rule), sharded_(sharded), steps_(storage.parameters()) {
  if (sharded_ && rule_.needs_norms())
    throw base::UsageError(
        "shard_state: this optimizer needs the norms of whole parameters, but the parameters are on a device and their "
        "state is sharded",
        "disable shard_state");
}

ForeachPass::Numbers::Numbers(const std::vector<ddp::GradientSource::Parameter>& parameters)
    : of_parameter(parameters.size()) {
  std::map<std::pair<at::DeviceType, at::DeviceIndex>, std::vector<std::size_t>> of_device;
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    const at::Device device = parameters[index].tensor.device();
    of_device[{device.type(), device.index()}].push_back(index);
  }
  for (auto& [device, indices] : of_device) {
    const at::Tensor all = at::zeros({static_cast<std::int64_t>(indices.size())},
                                     at::dtype(at::kFloat).device(at::Device(device.first, device.second)));
    const std::vector<at::Tensor> each = all.unbind();
    for (std::size_t i = 0; i < indices.size(); ++i) of_parameter[indices[i]] = each[i];
    devices.push_back({all, std::move(indices)});
  }
}

at::Tensor ForeachPass::shard_view(std::size_t index, const at::Tensor& whole) const {
  if (!sharded_) return whole;
  const ElementRange range = storage_.shard_of(index);
  return whole.as_strided({static_cast<std::int64_t>(range.count)}, {1},
                          whole.storage_offset() + static_cast<std::int64_t>(range.first));
}

std::vector<std::size_t> ForeachPass::update(const at::Tensor& found_inf, bool lr_on_device) {
  std::map<std::tuple<std::size_t, at::ScalarType, c10::DeviceType, int>, std::vector<std::size_t>> batches;
  std::vector<std::size_t> updated;
  for (std::size_t index = 0; index < storage_.parameters().size(); ++index) {
    const at::Tensor& tensor = storage_.parameters()[index].tensor;
    if (!tensor.grad().defined() || tensor.numel() == 0) continue;
    updated.push_back(index);
    if (storage_.shard_of(index).count == 0) continue;
    batches[{rule_.batch_key(index), tensor.scalar_type(), tensor.device().type(), tensor.device().index()}].push_back(
        index);
  }
  for (const auto& [key, batch] : batches) update_batch(batch, found_inf, lr_on_device);
  step_counts_stale_ |= found_inf.defined();
  return updated;
}

void ForeachPass::update_batch(const std::vector<std::size_t>& batch, const at::Tensor& found_inf, bool lr_on_device) {
  kernels::ForeachArgs list;
  std::vector<at::Tensor> stored;  // low-precision parameters, whose update is computed in float
  const at::ScalarType dtype = storage_.parameters()[batch.front()].tensor.scalar_type();
  const bool widen = dtype == at::kBFloat16 || dtype == at::kHalf;
  list.states.resize(rule_.state_names().size());
  for (const std::size_t index : batch) {
    at::Tensor parameter = shard_view(index, storage_.parameters()[index].tensor.detach()),
               gradient = shard_view(index, storage_.dense_gradient(index));
    if (widen) stored.push_back(parameter);
    list.parameters.push_back(widen ? parameter.to(at::kFloat) : std::move(parameter));
    list.gradients.push_back(widen ? gradient.to(at::kFloat) : std::move(gradient));
    for (std::size_t i = 0; i < list.states.size(); ++i) list.states[i].push_back(storage_.states(index)[i]);
    list.steps.push_back(steps_.of_parameter[index]);
  }
  if (found_inf.defined()) list.found_inf = found_inf.to(list.parameters.front().device());
  if (lr_on_device) list.lr = lr_numbers().of_parameter[batch.front()];
  rule_.update(batch.front(), list);
  if (widen) at::_foreach_copy_(stored, list.parameters);
}

ForeachPass::Numbers& ForeachPass::lr_numbers() {
  if (!lr_) {
    lr_.emplace(storage_.parameters());
    written_lr_.assign(storage_.parameters().size(), 0);
  }
  return *lr_;
}

void ForeachPass::write_lr() {
  for (const auto& [all, indices] : lr_numbers().devices)
    for (std::size_t first = 0, end = 0; first < indices.size(); first = end) {  // ranges with the same learning rate
      const double lr = rule_.lr(indices[first]);
      bool changed = false;
      for (end = first; end < indices.size() && rule_.lr(indices[end]) == lr; ++end)
        changed |= std::exchange(written_lr_[indices[end]], lr) != lr;
      if (changed) all.slice(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(end)).fill_(lr);
    }
}

void ForeachPass::sync_step_counts() {
  if (!step_counts_stale_) return;
  for (std::size_t index = 0; index < steps_.of_parameter.size(); ++index)
    if (rule_.steps(index) > 0)
      rule_.set_states(index, steps_.of_parameter[index].item<std::int64_t>(), storage_.states(index));
  step_counts_stale_ = false;
}

void ForeachPass::reset_step_counts() {
  for (std::size_t index = 0; index < steps_.of_parameter.size(); ++index)
    steps_.of_parameter[index].fill_(static_cast<double>(rule_.steps(index)));
  step_counts_stale_ = false;
}

}  // namespace lockstep::optim::inline fused
