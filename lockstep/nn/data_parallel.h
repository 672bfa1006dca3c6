// DataParallel: one process splits each batch over replicas of a module on several devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/nn/module_ref.h"

namespace lockstep::nn {

struct DataParallelOptions {
  /// One replica per entry; a device may be listed several times. The module is on the first.
  std::vector<at::Device> devices = {};
  std::optional<at::Device> output_device = {};  ///< default: the first
  std::int64_t dim = 0;                          ///< the dimension along which inputs are split and outputs are joined
  /// Returns a new module of the same class and structure; its values do not matter. Default: the module's clone(),
  /// which torch::nn::Cloneable provides.
  std::function<std::shared_ptr<torch::nn::Module>()> make_replica = nullptr;
};

/// Thrown when forward() of a replica throws. what() names the replica and its device; the original exception is nested
/// (std::rethrow_if_nested()).
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

struct DeviceUsage {
  at::Device device;
  int replicas = 0;
  std::int64_t samples = 0;         ///< in all forward() calls
  std::int64_t held_bytes = 0;      ///< parameters and buffers of its replicas; shared memory counts once
  std::int64_t received_bytes = 0;  ///< from other devices: parameters, inputs, outputs, gradients
  std::int64_t sent_bytes = 0;
  std::optional<std::int64_t> peak_bytes;  ///< peak bytes of this process's tensors there; empty on the CPU
};

/// Formats a table with a header row and one row per device:
///   device  replicas  samples         held     received         sent         peak
///   cuda:0         1       16      4.0 MiB      1.0 MiB      8.0 MiB     92.4 MiB
std::string format_device_usage(const std::vector<DeviceUsage>& device_usage);

/// Equivalent of PyTorch's DataParallel. forward() splits its input into parts whose sizes differ by at most one
/// sample, copies the module's values and one part to each replica, runs the replicas on threads, and joins their
/// outputs in order on the output device. Outputs without dimensions are joined into a vector. With fewer samples than
/// devices, the last devices are idle. backward() adds the replicas' gradients, in replica order, to the gradients of
/// the module's parameters.
///
/// Replicas are constructed once. Replicas on the module's device use the memory of its parameters; on other devices
/// the parameters are copied in each forward(). The first replica uses the module's buffers, so BatchNorm's running
/// statistics follow the first part of each batch; writes of other replicas to their buffers are lost. Training modes
/// of submodules are copied in each forward(); other members keep their values from construction. Replicas run with the
/// caller's grad mode and autocast settings.
///
/// The module itself is not changed: optimizers, checkpoints and printing work as without DataParallel. On CPU devices,
/// backward() runs on one thread regardless of their number; DistributedDataParallel uses all cores
/// (docs/how-to/data-parallel.md has measurements). Only one thread may call forward().
///
/// The constructor throws UsageError for invalid options, for a module without parameters and buffers, for one that is
/// not entirely on the first device, and for one with a SyncBatchNorm.
class DataParallel {
  // A module that outlives the constructor: not a temporary that nothing else owns.
  template <typename M>
  static constexpr bool KeepsModule =
      (std::is_lvalue_reference_v<M> && (ModuleClass<M> || ModuleHandle<M>)) || std::is_pointer_v<M> ||
      std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>> || requires(M& module) { module.ptr(); };

 public:
  using ForwardFunction = std::function<at::Tensor(torch::nn::Module& replica, const at::Tensor& input)>;

  /// `module` is a module with forward(tensor), or a handle of one. A module that is passed by reference, or by a plain
  /// pointer, must outlive this object.
  template <typename M>
    requires KeepsModule<M>
  DataParallel(M&& module, DataParallelOptions options)
      : DataParallel(
            module, [](auto& replica, const at::Tensor& input) { return replica.forward(input); }, std::move(options)) {
  }
  /// Calls `call(replica, part)` instead of forward(), for example
  /// [](NetImpl& net, const torch::Tensor& x) { return net.loss(x); }.
  template <typename M, typename Function>
    requires KeepsModule<M>
  DataParallel(M&& module, Function call, DataParallelOptions options)
      : DataParallel(shared_module(module), erase_type<ModuleOf<M>>(std::move(call)), std::move(options), ErasedTag()) {
  }
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;

  /// `input` may be on any device. Blocks until all replicas have returned, then throws ReplicaError for the first
  /// replica that threw, if any.
  at::Tensor forward(const at::Tensor& input);
  at::Tensor operator()(const at::Tensor& input) { return forward(input); }

  /// Usage since construction: one entry per device, the first device first.
  std::vector<DeviceUsage> device_usage() const;

 private:
  struct ErasedTag {};
  DataParallel(std::shared_ptr<torch::nn::Module> module, ForwardFunction call, DataParallelOptions options, ErasedTag);
  template <typename Module, typename Function>
  static ForwardFunction erase_type(Function call) {
    return [call = std::move(call)](torch::nn::Module& replica, const at::Tensor& input) -> at::Tensor {
      return call(static_cast<std::remove_const_t<Module>&>(replica), input);
    };
  }

  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Private to nn/: copies of tensors between devices, counted in both directions of the graph.

/// Counts the bytes copied between devices. Thread-safe.
class TransferCounter {
 public:
  struct Bytes {
    std::int64_t received = 0;
    std::int64_t sent = 0;
  };
  void count(at::Device from, at::Device to, std::int64_t bytes);
  Bytes bytes_of(at::Device device) const;

 private:
  mutable std::mutex mutex_;  // guards bytes_
  std::map<std::string, Bytes> bytes_;
};

/// Returns `tensor` on `device`, or `tensor` itself if it is already there. backward() copies its gradient back.
at::Tensor copy_to_device(const at::Tensor& tensor, at::Device device,
                          const std::shared_ptr<TransferCounter>& transfers);

/// Returns `parameter` on each of `devices`; on its own device the result uses the same memory. Its gradient is the sum
/// of the results' gradients in the order of `devices`, regardless of the order in which they are computed; undefined
/// gradients are skipped.
std::vector<at::Tensor> replicate(const at::Tensor& parameter, const std::vector<at::Device>& devices,
                                  const std::shared_ptr<TransferCounter>& transfers);

}  // namespace lockstep::nn
