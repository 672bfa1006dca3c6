#include "lockstep/amp/master_weights.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/base/error.h"

namespace lockstep::amp {

MasterWeights::MasterWeights(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  for (const at::Tensor& parameter : parameters_) {
    if (!parameter.is_floating_point())
      throw base::UsageError(std::string("MasterWeights: the dtype of a parameter is ") +
                             c10::toString(parameter.scalar_type()) + "; expected a floating-point dtype");
    const bool low = parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
    copies_.push_back(parameter.detach().to(low ? at::kFloat : parameter.scalar_type(), false, true).requires_grad_());
  }
}

void MasterWeights::copy_gradients_from_model() {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    copies_[i].mutable_grad() =
        gradient.defined() ? gradient.detach().to(copies_[i].scalar_type(), false, true) : at::Tensor();
  }
}

void MasterWeights::copy_values_to_model() const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < copies_.size(); ++i) parameters_[i].copy_(copies_[i]);
}

void MasterWeights::copy_values_from_model() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < copies_.size(); ++i) copies_[i].copy_(parameters_[i]);
}

}  // namespace lockstep::amp
