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
#include "lockstep/ddp/module_watch.h"
#include "lockstep/ddp/outer/host_averager.h"
#include "lockstep/ddp/replica_check.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/ddp/step_profile.h"

namespace lockstep::ddp {

class DistributedDataParallel::Impl final : public BackwardParticipant,
                                            public GradientSource,
                                            private comm::GradientSink {
 public:
  Impl(ModelTensors model, ModuleWatch watch, comm::Group group, DdpOptions options);
  ~Impl() override;
  /// Removes the hooks from the module, which may be destroyed afterwards.
  void detach_module();

  /// Throws UsageError if parameters or buffers of the module were replaced by others. Registers the hooks again of a
  /// parameter whose autograd node was replaced; the others accumulate on the current stream.
  void check_before_backward() override;
  void on_backward_end() override;
  void on_backward_error(const std::string& why, const std::vector<torch::autograd::Node*>& leaves) noexcept override;

  void enter_no_sync();
  void leave_no_sync() { --no_sync_depth_; }

  // For join(): shadow reductions, to which a rank that has no more batches contributes zeros.
  void begin_shadow_reduction(bool divide_by_active);
  bool can_finish_shadow_reduction() const { return reducer_->has_begun_on_all_ranks(); }
  /// Returns true while some rank still trains.
  bool finish_shadow_reduction();
  /// Returns the rank whose parameters all ranks have got; nothing if no rank ran out of batches before another.
  std::optional<int> finish_join();
  void abandon(const std::string& why) noexcept { reducer_->abandon(why); }
  /// Throws UsageError if join() cannot be used with this model's options or optimizer.
  void check_join_allowed() const;

  void replace_buffer(const at::Tensor& buffer, const at::Tensor& tensor);
  void make_host_averager();
  void average_hosts();
  void with_global_copy(const std::function<void()>& body);
  bool hosts_differ() const { return host_averager_.has_value(); }
  checkpoint::StateDict outer_state() const;
  void load_outer_state(const checkpoint::StateDict& state);
  void compare_replicas();

  // GradientSource
  std::vector<Parameter> parameters() const override;
  const comm::Group& host_group() const override {
    return optimizer_.host_group ? *optimizer_.host_group : reduce_group_;
  }
  bool attach_optimizer(comm::ChunkSink* sink) override;
  ShardOwners shard_owners() override;
  void scatter_means(const std::vector<std::vector<comm::ElementRange>>& shards, int owner) override;
  bool has_local_gradients() const override;
  std::uint64_t num_backwards() const override { return num_backwards_; }
  void update_in_backward(BackwardUpdater* updater) override;
  void require_outside_backward() const override;
  void require_gradients_unchanged() const override;
  void detach_optimizer() noexcept override;
  void on_parameters_updated() override;
  void on_update_skipped() override;
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
    std::vector<std::int64_t> reduced_strides;  // when the reducer was made
    std::shared_ptr<void> node;                 // keeps the node and its hook alive
    torch::autograd::Node* raw = nullptr;
    std::uintptr_t before_hook = 0, after_hook = 0;
    bool accumulated_locally = false;  // under no_sync(), since the last reduction
  };

  /// Of one backward(): reset by assignment when it begins.
  struct PassState {
    bool has_reached_parameter = false;
    bool has_leftover_gradients = false;  // gradients existed before it
    bool is_deferred = false;             // gradients are submitted at its end
    std::vector<std::size_t> deferred{};  // parameters reached while it is, in order
  };

  /// The reduction of the gradients of a step. begin_reduction(): kNone or kUnfinished -> kUnfinished -> kOpen;
  /// finish_reduction() and run_pass(): kOpen -> kUnfinished; complete_reduction(): -> kNone. A failed backward()
  /// leaves kUnfinished.
  enum class Reduction {
    kNone,        // none has begun since the last one was completed
    kOpen,        // has begun on this rank; gradients are submitted as they arrive
    kUnfinished,  // is being begun or finished, or has failed
  };

  /// The attached optimizer of lockstep::optim. Reset by assignment when it detaches.
  struct OptimizerLink {
    bool is_attached = false;
    bool has_sharded_state = false;            // it is divided between shard_owners()
    bool has_averaged_gradients = false;       // with local gradients: average_gradients() was called
    std::vector<comm::ElementRange> shards{};  // by parameter, of this rank's owner; empty: means are complete
    bool are_means_partial = false;            // gradients are means only in the shards
    int num_completed = 0;                     // times that all of these were needed
    std::vector<at::Tensor> means_aside{};     // by parameter: means of the shard, while gradients accumulate
    comm::ChunkSink* sink = nullptr;           // null: it uses averaged gradients
    BackwardUpdater* updater = nullptr;        // if it updates in backward()
    std::optional<comm::Group> host_group{};   // if reduce_group_ spans several hosts: its ranks on this host
    std::unique_ptr<comm::GradientReducer> host_reducer{};           // of the means that reducer_ has computed
    std::unordered_map<const void*, at::Tensor> parameter_memory{};  // by the tensor's address
  };

  struct JoinState {
    bool has_anyone_joined = false;
    int first_active_rank = 0;
  };

  /// Comparisons of the ranks' parameters.
  struct Replicas {
    std::optional<ReplicaCheck> check{};
    bool is_exchanging = false;     // the reduction that has begun carries hashes
    std::int64_t compared_at = -1;  // number of reductions when compare_replicas() was called last
  };

  void register_hooks(std::size_t index);
  void remove_hooks(HookedParameter& parameter) noexcept;
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
  void end_step(bool has_updated);
  std::vector<at::Tensor> tensors_to_average(bool are_parameters) const;
  bool is_complete_mean(std::size_t index) const;
  void complete_means();
  bool has_partial_means() const { return optimizer_.are_means_partial || !optimizer_.means_aside.empty(); }
  at::Tensor shard_of_gradient(std::size_t index) const;
  void put_partial_means_aside();
  void add_means_aside();
  void run_pass_on_means(comm::StepIdentity step, comm::ChunkSink& sink);
  void require_attached() const;
  void begin_update();
  void end_update();
  void check_backward_update() const;
  /// True if backward() leaves each rank its own gradients, for an optimizer to reduce.
  bool keeps_local_gradients() const { return optimizer_.sink != nullptr && in_place_reducer_ != nullptr; }
  /// False if all ranks use one copy of the parameters, and if ranks that have joined hold others.
  bool can_compare_replicas() const {
    return reduce_group_.size() > 1 && !keeps_local_gradients() && !join_.has_anyone_joined;
  }
  void submit_gradient(std::size_t index, bool fresh);
  void consume(std::size_t index, const at::Tensor& reduced) override;
  std::vector<comm::Collective> make_extra_ops();
  const at::Tensor& memory_of(const at::Tensor& tensor) const;

  const base::ForkGuard fork_guard_;  // a child made by fork() takes no part
  comm::Group group_;
  const DdpOptions options_;
  std::optional<HostLink> host_link_;  // with average_hosts_every or `outer`, as the next ones
  std::optional<HostAverager> host_averager_;
  std::optional<ReplicaCheck> host_check_;                 // of all ranks, after averages; null with one host
  std::int64_t num_averages_ = 0, hosts_compared_at_ = 0;  // the latter in reductions
  comm::Group reduce_group_;  // averages gradients: all ranks, or with average_hosts_every the ranks of this host
  std::vector<HookedParameter> parameters_;
  NamedTensors all_tensors_;        // parameters, and then buffers; broadcast at the end of join()
  std::size_t num_parameters_ = 0;  // of them
  BufferSync buffers_;
  std::unique_ptr<comm::GradientReducer> reducer_;
  comm::reducers::InPlaceGradientReducer* in_place_reducer_ = nullptr;  // reducer_->in_place()

  ModuleWatch module_watch_;
  Backward* backward_ = nullptr;  // the one that this object has joined
  std::mutex gradient_mutex_;     // autograd computes gradients on one thread per device; serialises the callbacks
  PassState pass_;
  Reduction reduction_ = Reduction::kNone;
  OptimizerLink optimizer_;
  JoinState join_;
  Replicas replicas_;
  GradientFingerprint gradient_fingerprint_;
  StepProfile* const profile_ = StepProfile::this_process();  // null except under `lockstep plan`
  std::size_t profiled_model_ = 0;
  bool detached_ = false;        // the module may have been destroyed
  bool reentrant_ = false;       // the model has run a nested backward()
  bool accumulating_ = false;    // gradients of an earlier backward() existed before this step
  bool stop_requested_ = false;  // on some rank, as agreed in a reduction
  int no_sync_depth_ = 0;
  std::uint64_t num_backwards_ = 0;  // those that reached a parameter
  std::int64_t num_reductions_ = 0;
  std::int64_t failed_backwards_ = 0;          // since the last reduction, before they began one
  std::int64_t local_backwards_ = 0;           // StepIdentity::local_backwards
  std::int64_t optimizer_steps_ = 0;           // calls of count_optimizer_step()
  std::shared_ptr<const void> step_observer_;  // of group_
};

}  // namespace lockstep::ddp
