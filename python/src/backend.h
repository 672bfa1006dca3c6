// The backend "lockstep" of torch.distributed: c10d's operations, executed by a Group. Results are those of c10d's
// Gloo; before data moves, the ranks compare what they call.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/comm/group.h"
#include "python/src/device_operations.h"
#include "python/src/host_operations.h"

namespace lockstep::python {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Threads: as torch calls a process group, one at a time; abort() from any.
class LockstepBackend final : public c10d::Backend {
 public:
  LockstepBackend(comm::Group group, std::chrono::milliseconds timeout)
      : Backend(group.rank(), group.size()), group_(std::move(group)), timeout_(timeout) {}

  /// From now on, operations on tensors of devices of this type are those of `inner`; `group` has the same ranks and is
  /// used for nothing else.
  void set_device(c10::DeviceType type, comm::Group group, c10::intrusive_ptr<c10d::Backend> inner);

  c10::intrusive_ptr<c10d::Backend> device_backend() const { return device_ ? device_->backend() : nullptr; }

  /// Ends the group: destroy_process_group() and the end of the program call it. Blocks until what is queued has ended.
  void shutdown() override;
  /// Ends what is queued with an error, on all ranks.
  void abort() override;

  const std::string getBackendName() const override { return "lockstep"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  bool supportsSplitting() const override { return device_ && device_->inner().supportsSplitting(); }
  void eagerConnectSingleDevice(at::Device device) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return num_operations_; }
  /// Without GPUs, torch calls the operations one by one.
  bool supportsCoalescing() const override { return device_ && device_->inner().supportsCoalescing(); }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& given) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override;
  /// Counts a step of an optimizer of a DistributedDataParallel on this group. The all_reduce of its gradients, which
  /// it starts inside backward(), compares the count between the ranks.
  void count_optimizer_step() { ++optimizer_steps_; }
  /// From now on, no longer: not all ranks start these operations inside backward().
  void stop_counting_steps() { counts_steps_ = false; }
  /// The sum of float32 tensors on the CPU, sent between hosts as `wire_dtype` (comm::CallOptions).
  WorkPtr allreduce_rounded(const at::Tensor& tensor, at::ScalarType wire_dtype);
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& given) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override;

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override;

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& given) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& given) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& given) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& given) override;

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& given) override;

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& given) override;

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& given) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& given) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& given) override;

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& given) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& given) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  WorkPtr barrier(const c10d::BarrierOptions& given) override;
  /// Goes through the store of torch.distributed: neither a rank that does not come nor a timeout ends the group.
  void monitoredBarrier(const c10d::BarrierOptions& given, bool wait_all_ranks) override;

 private:
  comm::CallOptions call_options(std::chrono::milliseconds timeout) const;
  std::string step_name() const;
  WorkPtr point_to_point(c10d::OpType type, const char* title, const at::Tensor& tensor, comm::Work work,
                         std::shared_ptr<int> source, std::function<void()> complete);
  void check_open() const;
  comm::CallOptions point_to_point_options(int tag) const;

  /// Runs `operation`: on this thread if the caller waits for it at once and nothing is queued, else on the executor's.
  /// `inputs` are for the profiler.
  template <typename Given, typename Operation>
  WorkPtr start(c10d::OpType type, const char* title, const Tensors& inputs, Tensors results, const Given& given,
                Operation operation);
  /// start() of an operation with one result, which is operation(the elements of `result`, options).
  template <typename Given, typename Operation>
  WorkPtr start_into(const at::Tensor& result, c10d::OpType type, const char* title, const Tensors& inputs,
                     const Given& given, Operation operation);

  /// Whether the operation is one of the device's backend. Throws UsageError if there is none for this tensor.
  bool on_device(const at::Tensor& tensor) const;

  std::optional<comm::Group> group_;
  std::int64_t num_monitored_ = 0;  // barriers
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> num_operations_{0};
  std::atomic<std::uint64_t> optimizer_steps_{0};
  std::atomic<bool> counts_steps_{true};
  std::optional<std::vector<WorkPtr>> coalesced_;  // on the CPU, since startCoalescing()
  c10::DeviceType device_type_ = c10::DeviceType::CUDA;
  std::optional<DeviceOperations> device_;
  std::optional<comm::channel::SerialExecutor> executor_{std::in_place};  // last member: ends before what it uses
};

}  // namespace lockstep::python
