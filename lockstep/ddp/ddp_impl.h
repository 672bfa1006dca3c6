// The implementation of DistributedDataParallel. Private to ddp/.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/base/process_owned.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/ddp/backward.h"
#include "lockstep/ddp/buffer_sync.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/gradient_fingerprint.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/ddp/host_averager.h"
#include "lockstep/ddp/module_watch.h"
#include "lockstep/ddp/replica_check.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

class DistributedDataParallel::Impl final : public BackwardParticipant,
                                            public GradientSource,
                                            private comm::GradientSink {
 public:
  Impl(ModelTensors model, ModuleWatch watch, comm::Group group, DdpOptions options);
  ~Impl() override;
  /// Removes the hooks from the module, which may be destroyed afterwards.
  void detach_module();

  void check_before_backward() override { check_module(); }
  void on_backward_end() override;
  void on_backward_error(const std::string& why, const std::vector<torch::autograd::Node*>& leaves) noexcept override;

  void enter_no_sync();
  void leave_no_sync();

  // For join(): shadow reductions, to which a rank that has no more batches contributes zeros.
  void begin_shadow_reduction(bool divide_by_active);
  bool can_finish_shadow_reduction() const { return reducer_->has_begun_on_all_ranks(); }
  /// Returns true while some rank still trains.
  bool finish_shadow_reduction();
  /// Returns the rank whose parameters all ranks have got; nothing if no rank ran out of batches before another.
  std::optional<int> finish_join();
  void abandon(const std::string& why) noexcept;
  /// Throws UsageError if join() cannot be used with this model's options or optimizer.
  void check_join_allowed() const;

  void replace_buffer(const at::Tensor& buffer, const at::Tensor& tensor);
  void average_hosts();
  void compare_replicas();

  // GradientSource
  std::vector<Parameter> parameters() const override;
  const comm::Group& host_group() const override { return host_group_ ? *host_group_ : reduce_group_; }
  bool attach_optimizer(comm::ChunkSink* sink) override;
  ShardOwners shard_owners() override;
  bool has_local_gradients() const override;
  std::uint64_t num_backwards() const override { return num_backwards_; }
  void update_in_backward(BackwardUpdater* updater) override;
  void require_outside_backward() const override;
  void require_gradients_unchanged() const override;
  void detach_optimizer() noexcept override;
  void on_parameters_updated() override;
  void on_step_end() override;
  void count_step() override { group_.step(); }
  void count_optimizer_step() { ++optimizer_steps_; }
  comm::SharedAllocation allocate_shared(std::size_t bytes) override;
  void set_parameter_memory(std::vector<at::Tensor> memory) override;
  void average_gradients() override;
  void run_pass(comm::GradientUse use, std::uint64_t options_hash, comm::ChunkSink& sink) override;

  const comm::Group& group() const { return group_; }
  comm::ReducerStats stats() const { return reducer_->stats(); }

 private:
  class BeforeAccumulateHook;
  class AfterAccumulateHook;
  /// A parameter and the autograd node that accumulates its gradient. The tensor itself holds the node weakly.
  struct HookedParameter {
    std::string name;
    at::Tensor tensor;
    std::shared_ptr<void> node;  // keeps the node and its hook alive
    torch::autograd::Node* raw = nullptr;
    std::uintptr_t before_hook = 0, after_hook = 0;
    bool accumulated_locally = false;  // under no_sync(), since the last reduction
  };

  void register_hooks(std::size_t index);
  void remove_hooks(HookedParameter& parameter) noexcept;
  /// Throws UsageError if parameters or buffers of the module were replaced by others. Registers the hooks again of a
  /// parameter whose autograd node was replaced; the others accumulate on the current stream.
  void check_module();
  /// Called before a parameter accumulates its gradient, on the thread that called backward(), or on one of autograd's
  /// threads for a GPU. The first call in a backward() joins it.
  void on_gradient_arrives();
  void begin_backward();
  /// No hook runs any more. The lock makes what they have written on autograd's threads visible to this one.
  void end_of_hooks() {
    const std::lock_guard lock(gradient_mutex_);
    backward_ = nullptr;
  }
  void check_not_shared() const;
  /// Called on the same threads when parameter `index` has accumulated its gradient.
  void on_gradient_accumulated(std::size_t index);
  void begin_reduction(comm::StepIdentity step, comm::ChunkSink* early_sink);
  void finish_reduction();
  void complete_reduction(const comm::Participation& participation, bool ends_step);
  void end_step();
  void run_pass_on_means(comm::StepIdentity step, comm::ChunkSink& sink);
  void require_attached() const;
  void begin_update();
  void end_update();
  void check_backward_update() const;
  /// True if backward() leaves each rank its own gradients, for an optimizer to reduce.
  bool keeps_local_gradients() const { return chunk_sink_ != nullptr && fused_reducer_ != nullptr; }
  /// False if all ranks use one copy of the parameters, and if ranks that have joined hold others.
  bool can_compare_replicas() const { return reduce_group_.size() > 1 && !keeps_local_gradients() && !anyone_joined_; }
  void submit_gradient(std::size_t index, bool fresh);
  void consume(std::size_t index, const at::Tensor& reduced) override;
  std::vector<comm::Collective> make_extra_ops();
  const at::Tensor& memory_of(const at::Tensor& tensor) const;

  const base::ForkGuard fork_guard_;  // a child made by fork() takes no part
  comm::Group group_;
  const DdpOptions options_;
  std::unique_ptr<HostAverager> host_averager_;  // with average_hosts_every
  comm::Group reduce_group_;  // averages gradients: all ranks, or with average_hosts_every the ranks of this host
  std::vector<HookedParameter> parameters_;
  NamedTensors all_tensors_;  // parameters and buffers, broadcast at the end of join()
  BufferSync buffers_;
  std::unique_ptr<comm::GradientReducer> reducer_;
  comm::FusedReducer* fused_reducer_ = nullptr;  // reducer_'s; null if it does not reduce in place

  ModuleWatch module_watch_;
  Backward* backward_ = nullptr;  // the one that this object has joined
  std::mutex gradient_mutex_;     // autograd computes gradients on one thread per device; serialises the callbacks
  bool detached_ = false;         // the module may have been destroyed
  std::optional<comm::Group>
      host_group_;  // with an optimizer, if reduce_group_ spans several hosts: its ranks on this host
  std::unique_ptr<comm::GradientReducer> host_reducer_;  // of the means that reducer_ has computed
  bool state_sharded_ = false;                           // the optimizer's state is divided between shard_owners()
  bool has_optimizer_ = false;                           // an optimizer of lockstep::optim is attached
  comm::ChunkSink* chunk_sink_ = nullptr;                // the optimizer's; null: it uses averaged gradients
  BackwardUpdater* backward_updater_ = nullptr;          // the same optimizer, if it updates in backward()
  bool gradients_averaged_ = false;                      // with local gradients: average_gradients() was called
  std::uint64_t num_backwards_ = 0;                      // those that reached a parameter
  std::int64_t local_backwards_ = 0;                     // StepIdentity::local_backwards
  std::int64_t optimizer_steps_ = 0;                     // calls of count_optimizer_step()
  std::unordered_map<const void*, at::Tensor> parameter_memory_;  // set_parameter_memory(), by the tensor's address
  GradientFingerprint gradient_fingerprint_;
  bool has_leftover_gradients_ = false;          // gradients existed before this backward()
  bool reduction_open_ = false;                  // this backward() has begun a reduction
  bool deferred_ = false;                        // gradients are submitted at the end of this backward()
  bool reentrant_ = false;                       // the model has run a nested backward()
  std::vector<std::size_t> deferred_gradients_;  // parameters reached while deferred_, in order
  bool reached_parameter_ = false;               // this backward() has reached a parameter
  int no_sync_depth_ = 0;
  std::int64_t failed_backwards_ = 0;  // since the last reduction, before they began one
  bool accumulating_ = false;
  std::int64_t num_reductions_ = 0;
  std::optional<ReplicaCheck> replica_check_;
  std::shared_ptr<const void> step_observer_;  // of group_
  bool comparing_replicas_ = false;
  bool in_reduction_ = false;             // also after a reduction that failed
  std::int64_t compared_reduction_ = -1;  // number of reductions when compare_replicas() was called last
  bool anyone_joined_ = false;
  bool stop_requested_ = false;  // on some rank, as agreed in a reduction
  int first_active_rank_ = 0;
};

}  // namespace lockstep::ddp
