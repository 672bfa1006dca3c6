#include "lockstep/nn/device_transfer.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <iomanip>
#include <sstream>

namespace lockstep::nn {

void TransferCounter::count(at::Device from, at::Device to, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes_[from.str()].sent += bytes;
  bytes_[to.str()].received += bytes;
}

TransferCounter::Bytes TransferCounter::bytes_of(at::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = bytes_.find(device.str());
  return found == bytes_.end() ? Bytes() : found->second;
}

namespace {

std::string format_bytes(std::int64_t bytes) {
  const bool few = bytes < (1 << 20);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (few ? 1 << 10 : 1 << 20)
       << (few ? " KiB" : " MiB");
  return text.str();
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TransferCounterPtr = std::shared_ptr<TransferCounter>;

/// Saved in the graph for backward().
struct CopyContext : torch::CustomClassHolder {
  CopyContext(at::Device from, TransferCounterPtr counted) : source(from), transfers(std::move(counted)) {}
  at::Device source;
  TransferCounterPtr transfers;
};

at::Tensor copy_and_count(const at::Tensor& tensor, at::Device device, TransferCounter& transfers) {
  if (tensor.device() == device) return tensor;
  transfers.count(tensor.device(), device, static_cast<std::int64_t>(tensor.nbytes()));
  return tensor.to(device, /*non_blocking=*/true);
}

void save_context(AutogradContext* context, const at::Tensor& tensor, const TransferCounterPtr& transfers) {
  context->set_materialize_grads(false);
  context->saved_data["copy_context"] =
      c10::IValue::make_capsule(c10::make_intrusive<CopyContext>(tensor.device(), transfers));
}

c10::intrusive_ptr<CopyContext> saved_context(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<CopyContext>(context->saved_data["copy_context"].toCapsule());
}

struct CopyToDevice : torch::autograd::Function<CopyToDevice> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, at::Device device,
                            const TransferCounterPtr& transfers) {
    save_context(context, tensor, transfers);
    return copy_and_count(tensor, device, *transfers);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto copy_context = saved_context(context);
    const at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? copy_and_count(gradient, copy_context->source, *copy_context->transfers) : gradient,
            at::Tensor(), at::Tensor()};
  }
};

struct ReplicateFunction : torch::autograd::Function<ReplicateFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& parameter,
                               const std::vector<at::Device>& devices, const TransferCounterPtr& transfers) {
    save_context(context, parameter, transfers);
    variable_list replicas;
    for (const at::Device device : devices)
      replicas.push_back(parameter.device() == device ? parameter.variable_data()
                                                      : copy_and_count(parameter, device, *transfers));
    return replicas;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto copy_context = saved_context(context);
    at::Tensor sum;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const at::Tensor here = copy_and_count(gradient, copy_context->source, *copy_context->transfers);
      sum = sum.defined() ? sum + here : here;
    }
    return {sum, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::string format_device_usage(const std::vector<DeviceUsage>& device_usage) {
  std::ostringstream text;
  const auto row = [&](const std::string& device, const std::string& replicas, const std::string& samples,
                       const std::string& held, const std::string& received, const std::string& sent,
                       const std::string& peak) {
    text << std::left << std::setw(6) << device << std::right << std::setw(10) << replicas << std::setw(9) << samples;
    for (const auto& bytes : {held, received, sent, peak}) text << std::setw(13) << bytes;
    text << '\n';
  };
  row("device", "replicas", "samples", "held", "received", "sent", "peak");
  for (const DeviceUsage& one : device_usage)
    row(one.device.str(), std::to_string(one.replicas), std::to_string(one.samples), format_bytes(one.held_bytes),
        format_bytes(one.received_bytes), format_bytes(one.sent_bytes),
        one.peak_bytes ? format_bytes(*one.peak_bytes) : "-");
  return text.str();
}

at::Tensor copy_to_device(const at::Tensor& tensor, at::Device device, const TransferCounterPtr& transfers) {
  return tensor.device() == device ? tensor : CopyToDevice::apply(tensor, device, transfers);
}

std::vector<at::Tensor> replicate(const at::Tensor& parameter, const std::vector<at::Device>& devices,
                                  const TransferCounterPtr& transfers) {
  return ReplicateFunction::apply(parameter, devices, transfers);
}

}  // namespace lockstep::nn
