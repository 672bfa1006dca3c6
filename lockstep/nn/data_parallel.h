// One process, several devices: a batch is split over replicas of a module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/nn/device_usage.h"

namespace torch::nn {
class Module;
}

namespace lockstep::nn {

struct DataParallelOptions {
  std::vector<at::Device>
      devices;  ///< one replica each; a device may be named several times. The module is on the first
  std::optional<at::Device> output_device;  ///< default: the first
  std::int64_t dim = 0;                     ///< along which inputs are split and outputs joined
  /// Makes a module of the same class and structure; its values do not matter. Default: the module's clone(), which
  /// torch::nn::Cloneable has.
  std::function<std::shared_ptr<torch::nn::Module>()> make_replica;
};

/// forward() of a replica threw; what() names the replica and its device. The exception itself is nested:
/// std::rethrow_if_nested().
class ReplicaError : public base::Error {
 public:
  ReplicaError(int replica_number, at::Device on, const std::string& message)
      : Error(base::Cause::kRankExited, message), replica_(replica_number), device_(on) {}
  int replica() const { return replica_; }
  at::Device device() const { return device_; }

 private:
  int replica_;
  at::Device device_;
};

/// As PyTorch's DataParallel. forward() splits its input into parts that differ by one sample at most, gives each
/// replica the module's values and one part, runs the replicas on threads, and joins their outputs in order, on the
/// output device; outputs without dimensions become a vector. With fewer samples than devices the last devices do
/// nothing. backward() adds all replicas' gradients in their order into the gradients of the module's parameters.
///
/// Replicas are made once. On the module's device they use the memory of its parameters, elsewhere they get them anew
/// in each forward(). The first uses the module's buffers (a BatchNorm's running statistics follow the first part of
/// each batch); what others write into theirs is lost. Which parts of the module are in training is copied each time,
/// other members as they were at construction. forward() of replicas has the caller's grad mode and autocast.
///
/// The module stays the user's: optimizers, files and printing are as without. Of devices that are a CPU the backward()
/// runs on one thread, whatever number they are; DistributedDataParallel uses all (docs/12 has figures). One thread
/// calls forward().
///
/// Throws UsageError for options that do not fit, a module with no parameter or buffer, one that is not all on the
/// first device, or one with a batch norm over ranks.
class DataParallel {
 public:
  using ForwardFunction = std::function<at::Tensor(torch::nn::Module& replica, const at::Tensor& input)>;

  /// For a torch::nn::ModuleHolder or a shared_ptr of a module with forward(tensor).
  template <typename Holder>
  DataParallel(const Holder& module, DataParallelOptions options)
      : DataParallel(
            module, [](auto& replica, const at::Tensor& input) { return replica.forward(input); }, std::move(options)) {
  }
  /// Calls `call(replica, part)` in forward()'s place: [](NetImpl& net, const torch::Tensor& x) { return net.loss(x); }
  template <typename Holder, typename Function>
  DataParallel(const Holder& module, Function call, DataParallelOptions options)
      : DataParallel(to_shared_ptr(module), erase_type<std::remove_reference_t<decltype(*module)>>(std::move(call)),
                     std::move(options), ErasedTag()) {}
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;

  /// `input` may be on any device. Throws ReplicaError for the first replica that threw, when all have ended.
  at::Tensor forward(const at::Tensor& input);
  at::Tensor operator()(const at::Tensor& input) { return forward(input); }

  /// Since construction: one entry for each device that is used, the first device first.
  std::vector<DeviceUsage> device_usage() const;

 private:
  struct ErasedTag {};
  DataParallel(std::shared_ptr<torch::nn::Module> module, ForwardFunction call, DataParallelOptions options, ErasedTag);
  template <typename Holder>
  static std::shared_ptr<torch::nn::Module> to_shared_ptr(const Holder& module) {
    if constexpr (requires { module.ptr(); })
      return module.ptr();
    else
      return module;
  }
  template <typename Module, typename Function>
  static ForwardFunction erase_type(Function call) {
    return [call = std::move(call)](torch::nn::Module& replica, const at::Tensor& input) -> at::Tensor {
      return call(static_cast<std::remove_const_t<Module>&>(replica), input);
    };
  }

  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::nn
