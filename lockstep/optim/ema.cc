#include "lockstep/optim/ema.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {
namespace {

using base::UsageError;

constexpr const char* kUpdatesKey = "n_averaged";     // as in PyTorch's AveragedModel
constexpr std::int64_t kElementsPerThread = 1 << 16;  // fewer do not justify waking a thread

void require_decay(double decay) { base::check_option(decay >= 0 && decay <= 1, "Ema", "decay", decay, "0 to 1"); }

bool can_use_kernel(const at::Tensor& weight) {
  return kernels::has_kernel(weight.scalar_type()) && weight.is_cpu() && weight.layout() == at::kStrided &&
         weight.is_non_overlapping_and_dense();
}

void update_ema_cpu(const at::Tensor& average, const at::Tensor& weight, double decay) {
  auto* to = static_cast<char*>(average.mutable_data_ptr());
  const auto* from = static_cast<const char*>(weight.const_data_ptr());
  at::parallel_for(0, weight.numel(), kElementsPerThread, [&](std::int64_t begin, std::int64_t end) {
    kernels::kernels().update_ema(weight.scalar_type(), to + begin * average.element_size(),
                                  from + begin * weight.element_size(), static_cast<std::size_t>(end - begin), decay);
  });
}

}  // namespace

std::function<double(std::int64_t)> ema_warmup(double decay) {
  require_decay(decay);
  return [decay](std::int64_t n) { return std::min(decay, static_cast<double>(1 + n) / static_cast<double>(10 + n)); };
}

Ema::Ema(nn::ModuleRef module, EmaOptions options) : options_(std::move(options)) {
  require_decay(options_.decay);
  const at::NoGradGuard no_grad;
  for (const auto& item : module->named_parameters()) add(item.key(), item.value());
  if (averages_.empty()) throw UsageError("Ema: the module has no floating-point parameters; expected at least one");
  if (options_.buffers)
    for (const auto& item : module->named_buffers()) add(item.key(), item.value());
}

void Ema::add(const std::string& name, const at::Tensor& weight) {
  const auto same = [&](const AveragedTensor& average) { return average.weight.is_same(weight); };
  if (!weight.defined() || !weight.is_floating_point() || std::any_of(averages_.begin(), averages_.end(), same)) return;
  if (name == kUpdatesKey)
    throw UsageError(
        "Ema: a parameter or buffer is named \"n_averaged\"; expected another name, because the state uses it");
  const bool low = weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf;
  averages_.push_back(
      {name, weight,
       at::empty_like(weight, weight.options().dtype(low ? at::kFloat : weight.scalar_type()).requires_grad(false))
           .copy_(weight)});
}

void Ema::update() {
  if (swapped_) throw UsageError("Ema: update() called while the averages are swapped in; restore the weights first");
  const double decay = options_.decay_schedule ? options_.decay_schedule(updates_) : options_.decay;
  require_decay(decay);
  const at::NoGradGuard no_grad;
  for (AveragedTensor& average : averages_) {
    if (can_use_kernel(average.weight) && average.weight.strides() == average.value.strides())
      update_ema_cpu(average.value, average.weight, decay);
    else
      average.value.mul_(decay).add_(average.weight, 1 - decay);
  }
  ++updates_;
}

// set_data() instead of a copy: the ranks of the host may share the memory of the weights.
Ema::SwapGuard::SwapGuard(Ema& ema) : ema_(ema) {
  std::vector<at::Tensor> averages;  // allocate all of them before the first is swapped in
  for (const AveragedTensor& average : ema_.averages_) {
    weights_.push_back(average.weight.variable_data());
    averages.push_back(average.value.to(average.weight.scalar_type()));
  }
  for (std::size_t i = 0; i < averages.size(); ++i) ema_.averages_[i].weight.set_data(averages[i]);
  ema_.swapped_ = true;
}

Ema::SwapGuard::~SwapGuard() {
  for (std::size_t i = 0; i < weights_.size(); ++i) ema_.averages_[i].weight.set_data(weights_[i]);
  ema_.swapped_ = false;
}

Ema::SwapGuard Ema::swap() {
  if (swapped_) throw UsageError("Ema: swap() called while the averages are swapped in; restore the weights first");
  return SwapGuard(*this);
}

checkpoint::StateDict Ema::state_dict() const {
  checkpoint::StateDict state = {{kUpdatesKey, updates_}};
  for (const AveragedTensor& average : averages_) state[average.name] = average.value;
  return state;
}

void Ema::load_state_dict(const checkpoint::StateDict& state) {
  const auto updates = checkpoint::value_of<std::int64_t>(state, kUpdatesKey);
  base::check_option(updates >= 0, "Ema", kUpdatesKey, static_cast<double>(updates), "0 or more");
  for (const AveragedTensor& average : averages_) {
    if (!state.contains(average.name)) throw UsageError("Ema: load_state_dict(): \"" + average.name + "\" is missing");
    if (checkpoint::value_of<at::Tensor>(state, average.name).sizes() != average.value.sizes())
      throw UsageError("Ema: load_state_dict(): \"" + average.name + "\" has another shape than its parameter");
  }
  if (state.size() > averages_.size() + 1) {
    checkpoint::StateDict unexpected = state;
    unexpected.erase(kUpdatesKey);
    for (const AveragedTensor& average : averages_) unexpected.erase(average.name);
    throw UsageError("Ema: load_state_dict(): \"" + unexpected.begin()->first + "\" does not belong to a parameter; " +
                     std::to_string(unexpected.size()) + " names are unexpected");
  }
  const at::NoGradGuard no_grad;
  for (AveragedTensor& average : averages_) average.value.copy_(checkpoint::value_of<at::Tensor>(state, average.name));
  updates_ = updates;
}

}  // namespace lockstep::optim
