#include "lockstep/nn/data_parallel.h"

#include <ATen/Functions.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <iomanip>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <typeinfo>

#include "lockstep/base/deadline.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/base/thread.h"
#include "lockstep/nn/sync_batch_norm.h"

namespace lockstep::nn {
namespace {

/// A fixed set of threads, which exist as long as this object: the first operation of each thread creates OpenMP
/// threads of its own, which would otherwise be created again in every run().
class ReplicaThreads {
 public:
  /// Starts `count` threads, so that run() can run `count` + 1 jobs at once.
  explicit ReplicaThreads(std::size_t count) {
    workers_.reserve(count);
    try {
      for (std::size_t i = 0; i < count; ++i) {
        auto worker = std::make_unique<Worker>();
        worker->thread = base::start_thread([&started = *worker] { run_worker(started); });
        workers_.push_back(std::move(worker));
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ReplicaThreads() { stop(); }

  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Runs job(0) on the caller's thread and job(1), ..., job(count - 1) on the other threads, with the caller's grad
  /// mode, autocast and other thread-local state of torch. Blocks until all jobs are done. Returns the exception of
  /// each job, or null. Not thread-safe.
  std::vector<std::exception_ptr> run(std::size_t count, const std::function<void(std::size_t)>& job) {
    std::vector<std::exception_ptr> thrown(count);
    const auto guarded = [&](std::size_t i) noexcept {
      try {
        job(i);
      } catch (...) {
        thrown[i] = std::current_exception();
      }
    };
    const at::ThreadLocalState state;
    for (std::size_t i = 1; i < count; ++i) {
      Worker& worker = *workers_[i - 1];
      const std::lock_guard lock(worker.mutex);
      worker.task = [&state, &guarded, i] {
        const at::ThreadLocalStateGuard caller_state(state);
        guarded(i);
      };
      worker.condition.notify_all();
    }
    guarded(0);
    for (std::size_t i = 1; i < count; ++i) {
      Worker& worker = *workers_[i - 1];
      std::unique_lock lock(worker.mutex);
      // bounded: by the duration of the replica's forward()
      base::wait_until(worker.condition, lock, base::Deadline::never(), [&] { return !worker.task; });
    }
    return thrown;
  }

 private:
  struct Worker {
    std::mutex mutex;  // guards task and stopping
    std::condition_variable condition;
    std::optional<std::function<void()>> task;
    bool stopping = false;
    std::thread thread;
  };

  static void run_worker(Worker& worker) {
    std::unique_lock lock(worker.mutex);
    while (true) {
      // bounded: until run() sets a task or the destructor sets stopping
      base::wait_until(worker.condition, lock, base::Deadline::never(), [&] { return worker.task || worker.stopping; });
      if (!worker.task) return;
      lock.unlock();
      (*worker.task)();
      lock.lock();
      worker.task.reset();
      worker.condition.notify_all();
    }
  }

  void stop() noexcept {
    for (const auto& worker : workers_) {
      const std::lock_guard lock(worker->mutex);
      worker->stopping = true;
      worker->condition.notify_all();
    }
    for (const auto& worker : workers_) worker->thread.join();  // bounded: the worker has no task, and stopping is set
  }

  std::vector<std::unique_ptr<Worker>> workers_;
};

/// The submodules, parameters and buffers of a module, in the same order in all replicas. The tensors are the module's
/// own; values are assigned to them.
struct ModuleTensors {
  explicit ModuleTensors(const std::shared_ptr<torch::nn::Module>& of)
      : module(of), modules(of->modules(/*include_self=*/false)) {
    for (const auto& item : of->named_parameters()) add(item, parameters);
    for (const auto& item : of->named_buffers())
      if (item.value().defined()) add(item, buffers);
  }
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // without `module`, which no shared_ptr may own
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  std::vector<std::string> names;

 private:
  template <typename Item>
  void add(const Item& item, std::vector<at::Tensor>& to) {
    to.push_back(item.value());
    names.push_back(item.key());
  }
};

void check_module(const ModuleTensors& original, at::Device device) {
  if (original.names.empty()) throw base::UsageError("DataParallel: the module has neither parameters nor buffers");
  if (has_sync_batch_norm(original.module))
    throw base::UsageError("DataParallel: the module contains a SyncBatchNorm, which all ranks must call equally often",
                           "use DistributedDataParallel");
  for (std::size_t i = 0; i < original.names.size(); ++i) {
    const std::size_t parameters = original.parameters.size();
    const at::Tensor& tensor = i < parameters ? original.parameters[i] : original.buffers[i - parameters];
    if (tensor.device() != device)
      throw base::UsageError("DataParallel: " + original.names[i] + " is on " + tensor.device().str() +
                             "; expected the first device, " + device.str());
  }
}

ModuleTensors make_replica(const ModuleTensors& original, at::Device device, const DataParallelOptions& options) {
  const auto made = options.make_replica ? options.make_replica() : original.module->clone(device);
  if (!made || made == original.module || typeid(*made) != typeid(*original.module))
    throw base::UsageError("DataParallel: make_replica returned " + (made ? made->name() : std::string("null")) +
                           "; expected a new " + original.module->name());
  made->to(device);
  ModuleTensors replica(made);
  if (replica.names != original.names || replica.modules.size() != original.modules.size())
    throw base::UsageError(
        "DataParallel: a replica has other parameters, buffers or submodules than the module; expected the same");
  for (const at::Tensor& parameter : replica.parameters)
    parameter.requires_grad_(false);  // update_replicas() connects it to the graph in each forward()
  return replica;
}

std::optional<std::int64_t> peak_bytes(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return std::nullopt;
  const auto all_pools = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return allocator->getDeviceStats(device.index()).allocated_bytes[all_pools].peak;
}

/// Makes `tensor` hold `value`. If that is the memory of `original`, they share a version counter, so that backward()
/// detects writes.
void assign_data(const at::Tensor& tensor, const at::Tensor& value, const at::Tensor& original) {
  tensor.set_data(value);
  if (tensor.is_alias_of(original) && !tensor.is_inference())
    torch::autograd::impl::set_version_counter(tensor, torch::autograd::impl::version_counter(original));
}

/// Adds the index of the current device: "cuda" becomes for example "cuda:0".
at::Device resolve_device(at::Device device) { return at::empty({0}, at::TensorOptions(device)).device(); }

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
  for (const DeviceUsage& usage : device_usage)
    row(usage.device.str(), std::to_string(usage.replicas), std::to_string(usage.samples),
        format_bytes(usage.held_bytes), format_bytes(usage.received_bytes), format_bytes(usage.sent_bytes),
        usage.peak_bytes ? format_bytes(*usage.peak_bytes) : "-");
  return text.str();
}

at::Tensor copy_to_device(const at::Tensor& tensor, at::Device device, const TransferCounterPtr& transfers) {
  return tensor.device() == device ? tensor : CopyToDevice::apply(tensor, device, transfers);
}

std::vector<at::Tensor> replicate(const at::Tensor& parameter, const std::vector<at::Device>& devices,
                                  const TransferCounterPtr& transfers) {
  return ReplicateFunction::apply(parameter, devices, transfers);
}

class DataParallel::Impl {
 public:
  Impl(std::shared_ptr<torch::nn::Module> module, ForwardFunction call, DataParallelOptions options)
      : original_(module), forward_(std::move(call)), options_(std::move(options)), samples_(options_.devices.size()) {
    if (options_.devices.empty())
      throw base::UsageError("DataParallel: the list of devices is empty; expected one or more");
    if (options_.dim < 0)
      throw base::UsageError("DataParallel: dim is " + std::to_string(options_.dim) + "; expected 0 or more");
    for (const at::Device device : options_.devices) devices_.push_back(resolve_device(device));
    output_device_ = options_.output_device ? resolve_device(*options_.output_device) : devices_.front();
    check_module(original_, devices_.front());
    for (const at::Device device : devices_) replicas_.push_back(make_replica(original_, device, options_));
    threads_ = base::make_process_owned<ReplicaThreads>(devices_.size() - 1);
  }

  at::Tensor forward(const at::Tensor& input) {
    const std::vector<at::Tensor> parts = scatter(input);
    update_replicas(parts.size());
    std::vector<at::Tensor> outputs(parts.size());
    const auto thrown = threads_->run(parts.size(), [&](std::size_t r) {
      const c10::DeviceGuard guard(devices_[r]);
      outputs[r] = forward_(*replicas_[r].module, parts[r]);
    });
    for (std::size_t r = 0; r < thrown.size(); ++r)
      if (thrown[r]) rethrow(r, thrown[r]);
    return gather(outputs);
  }

  std::vector<DeviceUsage> device_usage() const {
    std::vector<DeviceUsage> all;
    std::set<const void*> seen;
    const auto entry = [&](at::Device device) -> DeviceUsage& {
      for (DeviceUsage& usage : all)
        if (usage.device == device) return usage;
      const TransferCounter::Bytes moved_bytes = transfers_->bytes_of(device);
      return all.emplace_back(DeviceUsage{.device = device,
                                          .received_bytes = moved_bytes.received,
                                          .sent_bytes = moved_bytes.sent,
                                          .peak_bytes = peak_bytes(device)});
    };
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      DeviceUsage& usage = entry(devices_[r]);
      ++usage.replicas;
      usage.samples += samples_[r];
      for (const auto* tensors : {&replicas_[r].parameters, &replicas_[r].buffers})
        for (const at::Tensor& tensor : *tensors)
          if (tensor.device().type() == at::kMeta || seen.insert(tensor.const_data_ptr()).second)
            usage.held_bytes += static_cast<std::int64_t>(tensor.nbytes());
    }
    entry(output_device_);
    return all;
  }

 private:
  void update_replicas(std::size_t count) {
    const std::vector<at::Device> devices(devices_.begin(), devices_.begin() + static_cast<std::ptrdiff_t>(count));
    for (std::size_t i = 0; i < original_.parameters.size(); ++i) {
      const std::vector<at::Tensor> values = replicate(original_.parameters[i], devices, transfers_);
      for (std::size_t r = 0; r < count; ++r) {
        const at::Tensor& parameter = replicas_[r].parameters[i];
        assign_data(parameter, values[r], original_.parameters[i]);
        torch::autograd::impl::set_gradient_edge(parameter, values[r].requires_grad()
                                                                ? torch::autograd::impl::gradient_edge(values[r])
                                                                : torch::autograd::Edge());
      }
    }
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < original_.buffers.size(); ++i) {
      const at::Tensor& buffer = original_.buffers[i];
      for (std::size_t r = 0; r < count; ++r)
        assign_data(replicas_[r].buffers[i],
                    r == 0                           ? buffer
                    : devices_[r] == buffer.device() ? buffer.clone()
                                                     : copy_to_device(buffer, devices_[r], transfers_),
                    buffer);
    }
    const auto copy_mode = [](const torch::nn::Module& from, torch::nn::Module& to) {
      if (to.is_training() != from.is_training()) to.train(from.is_training());
    };
    for (std::size_t r = 0; r < count; ++r) {
      copy_mode(*original_.module, *replicas_[r].module);
      for (std::size_t i = 0; i < original_.modules.size(); ++i)
        copy_mode(*original_.modules[i], *replicas_[r].modules[i]);
    }
  }

  std::vector<at::Tensor> scatter(const at::Tensor& input) {
    if (options_.dim >= input.dim())
      throw base::UsageError("DataParallel: the input has " + std::to_string(input.dim()) +
                             " dimensions; expected more than dim, which is " + std::to_string(options_.dim));
    const std::int64_t samples = input.size(options_.dim);
    const std::int64_t count = std::clamp<std::int64_t>(samples, 1, static_cast<std::int64_t>(devices_.size()));
    std::vector<at::Tensor> parts;
    for (std::int64_t r = 0, begin = 0; r < count; ++r) {
      const std::int64_t length = samples / count + (r < samples % count ? 1 : 0);
      const auto place = static_cast<std::size_t>(r);
      parts.push_back(copy_to_device(input.narrow(options_.dim, begin, length), devices_[place], transfers_));
      samples_[place] += length;
      begin += length;
    }
    return parts;
  }

  at::Tensor gather(const std::vector<at::Tensor>& outputs) const {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& output : outputs)
      parts.push_back(copy_to_device(output.dim() == 0 ? output.view({1}) : output, output_device_, transfers_));
    if (parts.size() == 1) return parts[0];
    return at::cat(parts, outputs[0].dim() == 0 ? 0 : options_.dim);
  }

  [[noreturn]] void rethrow(std::size_t replica, const std::exception_ptr& thrown) const {
    const std::string where =
        "DataParallel: replica " + std::to_string(replica) + " on " + devices_[replica].str() + ": ";
    const auto error = [&](const std::string& what) {
      return ReplicaError(static_cast<int>(replica), devices_[replica], where + what);
    };
    try {
      std::rethrow_exception(thrown);
    } catch (const c10::Error& e) {
      std::throw_with_nested(error(e.what_without_backtrace()));
    } catch (const std::exception& e) {
      std::throw_with_nested(error(e.what()));
    } catch (...) {
      std::throw_with_nested(error("threw an object that is not a std::exception"));
    }
  }

  const ModuleTensors original_;
  const ForwardFunction forward_;
  const DataParallelOptions options_;
  std::vector<at::Device> devices_;
  at::Device output_device_ = at::kCPU;
  std::vector<ModuleTensors> replicas_;
  std::shared_ptr<TransferCounter> transfers_ =
      std::make_shared<TransferCounter>();  // shared with graphs that outlive this object
  std::vector<std::int64_t> samples_;
  std::shared_ptr<ReplicaThreads> threads_;
};

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module, ForwardFunction call, DataParallelOptions options,
                           ErasedTag)
    : impl_(std::make_unique<Impl>(std::move(module), std::move(call), std::move(options))) {}
DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&&) noexcept = default;

at::Tensor DataParallel::forward(const at::Tensor& input) { return impl_->forward(input); }
std::vector<DeviceUsage> DataParallel::device_usage() const { return impl_->device_usage(); }

}  // namespace lockstep::nn
