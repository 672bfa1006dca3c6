#include "lockstep/optim/fused/foreach_pass.h"

#include <ATen/ATen.h>

#include <map>
#include <tuple>

#include "lockstep/base/error.h"
#include "lockstep/comm/reducers/sparse_average.h"
#include "lockstep/optim/kernels/foreach_update.h"

namespace lockstep::optim {

/// Parts that one operation updates.
struct TensorPass::Alike {
  at::ScalarType dtype;
  std::vector<std::size_t> parts;
};

TensorPass::TensorPass(const ParameterHome& home, Rule& rule, bool divided)
    : home_(home), rule_(rule), divided_(divided) {
  if (divided_ && rule_.measures())
    throw base::UsageError(
        "shard_state: this optimizer needs the norms of whole parameters, which are on a device and divided; allowed "
        "are optimizers that do not",
        "do without shard_state");
  // One allocation on each device.
  std::map<at::Device, std::vector<std::size_t>, bool (*)(const at::Device&, const at::Device&)> of_device(
      [](const at::Device& a, const at::Device& b) {
        return std::tuple(a.type(), a.index()) < std::tuple(b.type(), b.index());
      });
  for (std::size_t part = 0; part < home_.parameters().size(); ++part)
    of_device[home_.parameters()[part].tensor.device()].push_back(part);
  steps_.resize(home_.parameters().size());
  for (const auto& [device, parts] : of_device) {
    const std::vector<at::Tensor> counts =
        at::zeros({static_cast<std::int64_t>(parts.size())}, at::dtype(at::kFloat).device(device)).unbind();
    for (std::size_t i = 0; i < parts.size(); ++i) steps_[parts[i]] = counts[i];
  }
}

/// In the parameter's strides and dtype.
at::Tensor TensorPass::gradient_like(std::size_t part) const {
  const auto& [name, tensor] = home_.parameters()[part];
  const at::Tensor& gradient = tensor.grad();
  if (gradient.layout() != at::kStrided) comm::refuse_sparse(name);
  if (gradient.strides() == tensor.strides() && gradient.scalar_type() == tensor.scalar_type()) return gradient;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false)).copy_(gradient);
}

at::Tensor TensorPass::own(std::size_t part, const at::Tensor& whole) const {
  if (!divided_) return whole;
  const Range range = home_.own(part);
  return whole.as_strided({static_cast<std::int64_t>(range.count)}, {1},
                          whole.storage_offset() + static_cast<std::int64_t>(range.first));
}

std::vector<std::size_t> TensorPass::run_all(const at::Tensor& skip) {
  std::map<std::tuple<std::size_t, at::ScalarType, c10::DeviceType, int>, Alike> runs;
  std::vector<std::size_t> updated;
  for (std::size_t part = 0; part < home_.parameters().size(); ++part) {
    const at::Tensor& tensor = home_.parameters()[part].tensor;
    if (!tensor.grad().defined()) continue;
    updated.push_back(part);
    if (home_.own(part).count == 0) continue;
    Alike& alike = runs[{rule_.alike(part), tensor.scalar_type(), tensor.device().type(), tensor.device().index()}];
    alike.dtype = tensor.scalar_type();
    alike.parts.push_back(part);
  }
  for (const auto& [key, alike] : runs) run(alike.parts.front(), alike, skip);
  behind_ |= skip.defined();
  return updated;
}

void TensorPass::run(std::size_t part, const Alike& alike, const at::Tensor& skip) {
  TensorRun list;
  std::vector<at::Tensor> stored;  // where what is computed in float comes from, and goes to
  const bool widen = alike.dtype == at::kBFloat16 || alike.dtype == at::kHalf;
  list.states.resize(rule_.state_names().size());
  for (const std::size_t one : alike.parts) {
    at::Tensor parameter = own(one, home_.parameters()[one].tensor.detach()), gradient = own(one, gradient_like(one));
    if (widen) stored.push_back(parameter);
    list.parameters.push_back(widen ? parameter.to(at::kFloat) : std::move(parameter));
    list.gradients.push_back(widen ? gradient.to(at::kFloat) : std::move(gradient));
    for (std::size_t i = 0; i < list.states.size(); ++i) list.states[i].push_back(home_.states(one)[i]);
    list.steps.push_back(steps_[one]);
  }
  if (skip.defined()) list.skip = skip.to(list.parameters.front().device());
  rule_.update(part, list);
  if (widen) at::_foreach_copy_(stored, list.parameters);
}

void TensorPass::settle() {
  if (!behind_) return;
  for (std::size_t part = 0; part < steps_.size(); ++part)
    if (rule_.steps(part) > 0) rule_.set_states(part, steps_[part].item<std::int64_t>(), home_.states(part));
  behind_ = false;
}

void TensorPass::recount() {
  for (std::size_t part = 0; part < steps_.size(); ++part) steps_[part].fill_(static_cast<double>(rule_.steps(part)));
  behind_ = false;
}

}  // namespace lockstep::optim
