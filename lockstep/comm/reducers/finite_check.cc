#include "lockstep/comm/reducers/finite_check.h"

#include <ATen/ops/aminmax.h>

#include <cmath>
#include <utility>

#include "lockstep/comm/reducers/forwarding_reducer.h"

namespace lockstep::comm::reducers {
namespace {

class FiniteCheckReducer final : public ForwardingReducer {
 public:
  FiniteCheckReducer(std::unique_ptr<GradientReducer> inner, std::vector<std::string> names, int rank,
                     std::function<void(const base::CommError&)> fail)
      : ForwardingReducer(std::move(inner)), names_(std::move(names)), rank_(rank), fail_(std::move(fail)) {}

  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    if (values.numel() > 0) check_values(values, names_[index]);
    return ForwardingReducer::ready(index, gradient, fresh);
  }

 private:
  void check_values(const at::Tensor& values, const std::string& name) {
    const auto [min, max] = at::aminmax(values);
    const double low = min.item<double>(), high = max.item<double>();
    if (std::isfinite(low) && std::isfinite(high)) return;
    fail_({base::Cause::kNonFinite, "backward", rank_, rank_,
           "the gradient of " + name + " on rank " + std::to_string(rank_) +
               " has values that are not finite: minimum " + std::to_string(low) + ", maximum " + std::to_string(high),
           "check this rank's batch and loss; lower the learning rate, or use clip_grad_norm()"});
  }

  const std::vector<std::string> names_;
  const int rank_;
  const std::function<void(const base::CommError&)> fail_;
};

}  // namespace

std::unique_ptr<GradientReducer> with_finite_check(std::unique_ptr<GradientReducer> inner,
                                                   std::vector<std::string> names, int rank,
                                                   std::function<void(const base::CommError&)> fail) {
  return std::make_unique<FiniteCheckReducer>(std::move(inner), std::move(names), rank, std::move(fail));
}

}  // namespace lockstep::comm::reducers
