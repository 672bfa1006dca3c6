#include "lockstep/ddp/gradient_fingerprint.h"

#include <cstring>

namespace lockstep::ddp {

GradientWitness::Seen GradientWitness::look(const at::Tensor& gradient) {
  Seen seen;
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0 || !gradient.device().is_cpu())
    return seen;
  seen.noted = true;
  seen.version = gradient._version();
  if (!gradient.is_non_overlapping_and_dense()) return seen;
  const auto* data = static_cast<const char*>(gradient.const_data_ptr());
  const auto last = static_cast<std::size_t>(gradient.numel()) - 1;
  for (std::size_t i = 0; i < seen.values.size(); ++i)
    std::memcpy(&seen.values[i], data + last * i / (seen.values.size() - 1) * gradient.element_size(),
                gradient.element_size());
  return seen;
}

void GradientWitness::note(std::size_t index, const at::Tensor& gradient) {
  if (seen_.size() <= index) seen_.resize(index + 1);
  seen_[index] = look(gradient);
}

bool GradientWitness::unchanged(std::size_t index, const at::Tensor& gradient) const {
  if (index >= seen_.size() || !seen_[index].noted) return true;
  const Seen now = look(gradient);
  return !now.noted || (now.version == seen_[index].version && now.values == seen_[index].values);
}

}  // namespace lockstep::ddp
