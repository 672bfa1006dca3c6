#include "lockstep/nn/device_transfer.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace lockstep::nn {

void Traffic::count(at::Device from, at::Device to, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes_[from.str()].sent += bytes;
  bytes_[to.str()].received += bytes;
}

Traffic::Bytes Traffic::of(at::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = bytes_.find(device.str());
  return found == bytes_.end() ? Bytes() : found->second;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TrafficPtr = std::shared_ptr<Traffic>;

/// Lives in the graph.
struct Way : torch::CustomClassHolder {
  Way(at::Device from, TrafficPtr counted) : home(from), traffic(std::move(counted)) {}
  at::Device home;
  TrafficPtr traffic;
};

at::Tensor copied(const at::Tensor& tensor, at::Device device, Traffic& traffic) {
  if (tensor.device() == device) return tensor;
  traffic.count(tensor.device(), device, static_cast<std::int64_t>(tensor.nbytes()));
  return tensor.to(device, /*non_blocking=*/true);
}

void save(AutogradContext* context, const at::Tensor& tensor, const TrafficPtr& traffic) {
  context->set_materialize_grads(false);
  context->saved_data["way"] = c10::IValue::make_capsule(c10::make_intrusive<Way>(tensor.device(), traffic));
}

c10::intrusive_ptr<Way> saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Way>(context->saved_data["way"].toCapsule());
}

struct Move : torch::autograd::Function<Move> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, at::Device device,
                            const TrafficPtr& traffic) {
    save(context, tensor, traffic);
    return copied(tensor, device, *traffic);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto way = saved(context);
    const at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? copied(gradient, way->home, *way->traffic) : gradient, at::Tensor(), at::Tensor()};
  }
};

struct Replicate : torch::autograd::Function<Replicate> {
  static variable_list forward(AutogradContext* context, const at::Tensor& parameter,
                               const std::vector<at::Device>& devices, const TrafficPtr& traffic) {
    save(context, parameter, traffic);
    variable_list replicas;
    for (const at::Device device : devices)
      replicas.push_back(parameter.device() == device ? parameter.variable_data()
                                                      : copied(parameter, device, *traffic));
    return replicas;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto way = saved(context);
    at::Tensor sum;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const at::Tensor here = copied(gradient, way->home, *way->traffic);
      sum = sum.defined() ? sum + here : here;
    }
    return {sum, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor moved(const at::Tensor& tensor, at::Device device, const TrafficPtr& traffic) {
  return tensor.device() == device ? tensor : Move::apply(tensor, device, traffic);
}

std::vector<at::Tensor> replicated(const at::Tensor& parameter, const std::vector<at::Device>& devices,
                                   const TrafficPtr& traffic) {
  return Replicate::apply(parameter, devices, traffic);
}

}  // namespace lockstep::nn
