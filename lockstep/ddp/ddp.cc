#include "lockstep/ddp/ddp.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {
namespace {

using base::UsageError;

/// Exchanges after construction in which the replicas' parameters are compared: an optimizer that was made before its
/// parameters were equal shows within its first updates. Hashing costs a tenth of a millisecond a megabyte.
constexpr std::int64_t kComparedExchanges = 8;

/// backward() calls in the process that no DDP should count: under anybody's no_sync().
thread_local int quiet = 0;

class AccumulatedHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit AccumulatedHook(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

NamedTensors without(NamedTensors tensors, const std::vector<std::string>& ignored) {
  std::erase_if(tensors, [&](const auto& item) {
    return std::find(ignored.begin(), ignored.end(), item.first) != ignored.end();
  });
  return tensors;
}

void check_options(const DdpOptions& options, const NamedTensors& parameters, const NamedTensors& buffers) {
  if (!(options.predivide >= 0) || !std::isfinite(options.predivide))
    throw UsageError("DdpOptions.predivide is " + std::to_string(options.predivide) + "; allowed are 0 and more");
  for (const std::int64_t bytes : options.bucket_bytes)
    if (bytes < 1 || options.bucket_bytes.size() > 2)
      throw UsageError("DdpOptions.bucket_bytes holds " + std::to_string(bytes) + " and has " +
                       std::to_string(options.bucket_bytes.size()) + " sizes; allowed are one or two, of 1 or more");
  if (options.wire != at::kFloat && options.wire != at::kBFloat16 && options.wire != at::kHalf)
    throw UsageError(std::string("DdpOptions.wire is ") + c10::toString(options.wire) +
                     "; allowed are float32, bfloat16 and float16");
  if (options.wire != at::kFloat && options.hook)
    throw UsageError("DdpOptions.wire is " + std::string(comm::name(options.wire)) + ", but there is a hook (" +
                     options.hook->name() + "), which says itself what travels; allowed with a hook is float32");
  if (options.compare_every < 0)
    throw UsageError("DdpOptions.compare_every is " + std::to_string(options.compare_every) + "; allowed is 0 or more");
  if (options.host_sync_every < 1)
    throw UsageError("DdpOptions.host_sync_every is " + std::to_string(options.host_sync_every) +
                     "; allowed is 1 or more");
  for (const std::string& name : options.ignore) {
    const auto named = [&](const auto& item) { return item.first == name; };
    if (std::none_of(parameters.begin(), parameters.end(), named) &&
        std::none_of(buffers.begin(), buffers.end(), named))
      throw UsageError("DdpOptions.ignore names \"" + name + "\", which is no parameter or buffer of the module");
  }
}

}  // namespace

DistributedDataParallel::Impl::Impl(torch::nn::Module& module, comm::Group the_group, DdpOptions options)
    : group_(std::move(the_group)),
      options_(std::move(options)),
      peers_(group_),
      buffers_(without(named_buffers(module), options_.ignore), options_.buffers) {
  check_options(options_, named_parameters(module), named_buffers(module));
  const NamedTensors parameters = without(named_parameters(module), options_.ignore);
  const NamedTensors buffers = without(named_buffers(module), options_.ignore);
  if (std::none_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.second.requires_grad(); }))
    throw UsageError("DistributedDataParallel: no parameter of the module requires a gradient",
                     "there is nothing to average; a module that is only evaluated needs no DistributedDataParallel");
  std::string text = "buffers " + std::to_string(static_cast<int>(options_.buffers)) + " hook " +
                     (options_.hook ? options_.hook->name() : "none") + " bucket_bytes";
  for (const std::int64_t bytes : options_.bucket_bytes) text += " " + std::to_string(bytes);
  text += " wire " + std::string(comm::name(options_.wire)) + " host_sync_every " +
          std::to_string(options_.host_sync_every) + " predivide " + std::to_string(options_.predivide) +
          " compare_every " + std::to_string(options_.compare_every) + " check_finite " +
          std::to_string(options_.check_finite) + " overlap " + std::to_string(options_.overlap) + " bucket_layout " +
          options_.bucket_layout;
  compare_models(parameters, buffers, text, group_);
  all_tensors_ = parameters;
  all_tensors_.insert(all_tensors_.end(), buffers.begin(), buffers.end());
  broadcast_tensors(all_tensors_, group_);

  if (options_.host_sync_every > 1) {
    peers_ = group_.split_by_host();
    host_sync_ = std::make_unique<HostSync>(group_, all_tensors_, options_.host_sync_every, options_.wire);
  }

  std::vector<comm::Part> parts;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.is_floating_point()) continue;  // integers have no gradient
    parts.push_back({name, tensor.detach()});
    parameters_.push_back({.name = name, .tensor = tensor});
    replicas_.emplace_back(name, tensor.detach());
  }
  const std::string name = parts.front().name + "..";
  exchange_ = peers_.make_exchange(name, std::move(parts),
                                   {.bucket_bytes = options_.bucket_bytes,
                                    .hook = options_.hook,
                                    .predivide = options_.predivide,
                                    .wire = host_sync_ ? at::kFloat : options_.wire,
                                    .layout = options_.bucket_layout,
                                    .check_finite = options_.check_finite});
  const auto count = static_cast<std::int64_t>(parameters_.size());
  hashes_ = at::zeros({count}, at::kLong);
  all_hashes_ = at::zeros({count * peers_.size()}, at::kLong);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].tensor.requires_grad()) watch(i);
  listen(this);
}

DistributedDataParallel::Impl::~Impl() { close(); }

void DistributedDataParallel::Impl::close() {
  if (closed_) return;
  closed_ = true;
  unlisten(this);
  for (Watched& parameter : parameters_)
    if (parameter.raw) parameter.raw->del_post_hook(parameter.hook);
}

void DistributedDataParallel::Impl::watch(std::size_t index) {
  Watched& parameter = parameters_[index];
  auto node = torch::autograd::impl::grad_accumulator(parameter.tensor);
  parameter.raw = node.get();
  parameter.hook = node->add_post_hook(std::make_unique<AccumulatedHook>([this, index] { accumulated(index); }));
  parameter.node = std::make_shared<decltype(node)>(std::move(node));
}

void DistributedDataParallel::Impl::backward_begun() {
  caller_ = std::this_thread::get_id();
  reached_ = open_ = false;
  born_.clear();
  bool any_gradient = false;
  bool any_dirty = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Watched& parameter = parameters_[i];
    if (!parameter.raw && parameter.tensor.requires_grad()) watch(i);  // thawed since
    any_gradient |= parameter.tensor.grad().defined();
    any_dirty |= parameter.dirty;
  }
  // Gradients that are there may be those of no_sync(); then what was said before the first of those stands.
  if (!any_gradient)
    accumulating_ = false;
  else if (!any_dirty)
    accumulating_ = true;
  if (!any_gradient)
    for (Watched& parameter : parameters_) parameter.dirty = false;
  left_over_ = any_gradient;
  deferred_ = reentrant_ || !options_.overlap || exchanges_ == 0;
}

void DistributedDataParallel::Impl::backward_nested() {
  // A parameter may get its gradient in several parts from now on: nothing more may leave before the end.
  deferred_ = reentrant_ = true;
}

void DistributedDataParallel::Impl::accumulated(std::size_t index) {
  const std::lock_guard lock(accumulated_mutex_);
  const comm::Watch::OnBehalfOf caller(caller_);
  Watched& parameter = parameters_[index];
  if (!parameter.tensor.grad().defined()) return;  // an undefined gradient came through the node
  reached_ = true;
  if (updater_) refuse_early_update();
  if (no_sync_ > 0 || (leaves_gradients() && !updater_)) {
    parameter.dirty = true;
    averaged_ = false;
    return;
  }
  const at::NoGradGuard no_grad;
  if (!open_) updater_ ? begin_update() : begin_exchange(group_.step_identity());
  if (exchange_->is_ready(index))
    throw UsageError(
        "the gradient of " + parameter.name + " came twice in one backward(), after its exchange had begun",
        "the model began to run backward() inside backward(): set DdpOptions.overlap to false");
  if (!deferred_)
    hand_over(index, true);
  else if (std::find(born_.begin(), born_.end(), index) == born_.end())
    born_.push_back(index);
}

void DistributedDataParallel::Impl::hand_over(std::size_t index, bool fresh) {
  // What refers to the old values without needing this gradient fails from now on, instead of using new ones.
  if (updater_) torch::autograd::impl::bump_version(parameters_[index].tensor);
  // Released here and now, its memory serves the gradients of the next layers.
  const at::Tensor place = exchange_->ready(index, parameters_[index].tensor.grad(), fresh);
  if (place.defined()) take(index, place);
}

void DistributedDataParallel::Impl::backward_ended() {
  backwards_ += reached_;
  if (leaves_gradients() && !updater_) {
    for (std::size_t i = 0; reached_ && i < parameters_.size(); ++i) witness_.note(i, parameters_[i].tensor.grad());
  } else if (open_) {
    finish_exchange();
    if (updater_) end_update();
  } else if (!reached_ && quiet == 0) {
    ++lost_backwards_;
  }
}

void DistributedDataParallel::Impl::backward_failed(const std::string& why) noexcept {
  if (!open_) return;
  open_ = false;
  exchange_->abandon("backward() failed: " + why.substr(0, why.find('\n')));
}

std::vector<comm::Collective> DistributedDataParallel::Impl::pack_along() {
  std::vector<comm::Collective> along;
  if (peers_.size() == 1) return along;
  along = buffers_.pack();
  const bool is_time =
      exchanges_ <= kComparedExchanges || (options_.compare_every > 0 && exchanges_ % options_.compare_every == 0);
  comparing_ = exchanges_ > 0 && is_time && !leaves_gradients();  // those have one copy of the parameters
  if (comparing_) {
    const auto hashes = hash_tensors(replicas_);
    std::copy(hashes.begin(), hashes.end(), hashes_.mutable_data_ptr<std::int64_t>());
    along.push_back({.kind = comm::Kind::kAllGather, .name = "hashes", .input = hashes_, .output = all_hashes_});
  }
  return along;
}

void DistributedDataParallel::Impl::begin_exchange(comm::StepIdentity step) {
  step.lost_backwards = lost_backwards_;
  step.accumulating = accumulating_ && !leaves_gradients();
  exchange_->begin(step, pack_along());
  open_ = true;
}

void DistributedDataParallel::Impl::finish_exchange() {
  const at::NoGradGuard no_grad;
  open_ = false;  // whatever happens now is not for backward_failed()
  for (const std::size_t index : born_) hand_over(index, true);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Watched& parameter = parameters_[i];
    if (!exchange_->is_ready(i) && parameter.tensor.grad().defined()) hand_over(i, parameter.dirty);
  }
  const bool gives = updater_ && leaves_gradients();
  close_exchange(gives ? exchange_->pieces()->finish_pieces(*updated_) : exchange_->finish(*this),
                 gives || !has_optimizer_);
  for (Watched& parameter : parameters_) parameter.dirty = false;
}

void DistributedDataParallel::Impl::close_exchange(const comm::Attendance& attendance, bool ends_step) {
  if (peers_.size() > 1) {
    check_replicas();
    buffers_.unpack(peers_.size());
  }
  anyone_joined_ |= attendance.active < peers_.size();
  last_active_ = attendance.first;
  lost_backwards_ = 0;
  accumulating_ = false;
  ++exchanges_;
  stop_wanted_ |= attendance.stop_requested;
  if (ends_step) return end_step();
  if (!host_sync_ && stop_wanted_) group_.agree_to_stop();
}

/// Parameters are updated, or are about to be by an optimizer of torch: hosts may exchange them.
void DistributedDataParallel::Impl::end_step() {
  // With host_sync_every an exchange is among the ranks of a host: the others hear of a stop when hosts meet.
  const bool all_know = host_sync_ == nullptr || host_sync_->exchanged(stop_wanted_);
  if (all_know && stop_wanted_) group_.agree_to_stop();
}

void DistributedDataParallel::Impl::average_hosts() {
  if (host_sync_) host_sync_->average();
}

void DistributedDataParallel::Impl::check_join() const {
  if (options_.host_sync_every > 1)
    throw UsageError("join: DdpOptions.host_sync_every is " + std::to_string(options_.host_sync_every) +
                     "; allowed here is 1: hosts that have no more batches would miss the others' averages");
  if (divided_)
    throw UsageError(
        "join: the state of this model's optimizer is divided between the ranks (FusedOptions.shard_state), so that "
        "one without batches would keep its part from the others",
        "do without shard_state, or give all ranks equally many batches");
  if (among_sharers_)
    throw UsageError(
        "join: an optimizer of lockstep::optim is allowed here when all ranks share a host; these are on several",
        "use an optimizer of torch::optim");
}

void DistributedDataParallel::Impl::check_replicas() {
  if (!comparing_ || anyone_joined_) return;
  const auto* first = all_hashes_.const_data_ptr<std::int64_t>();
  std::vector<int> ranks;
  for (int rank = 0; rank < peers_.size(); ++rank) ranks.push_back(peers_.global_rank(rank));
  int odd = -1;
  const std::string text = describe_divergence(replicas_, {first, first + all_hashes_.numel()}, ranks, odd);
  if (!text.empty())
    peers_.fail(
        {base::Cause::kReplicaDiverged, "DistributedDataParallel", peers_.global_rank(peers_.rank()), odd, text,
         "an optimizer made before DistributedDataParallel, with state of its own derived from the parameters, needs "
         "lockstep::broadcast_optimizer_state(); a parameter must not be written on one rank alone"});
}

void DistributedDataParallel::Impl::take(std::size_t index, const at::Tensor& mean) {
  at::Tensor& gradient = parameters_[index].tensor.mutable_grad();
  const bool there = gradient.defined() && !gradient.is_sparse() && !mean.is_sparse() &&
                     gradient.const_data_ptr() == mean.const_data_ptr() && gradient.strides() == mean.strides();
  // A tensor of its own on the same memory: what the user does to the gradient's metadata stays there.
  if (!there) gradient = mean.is_sparse() ? mean : mean.detach();
}

void DistributedDataParallel::Impl::enter_no_sync() {
  if (updater_)
    throw UsageError(
        "no_sync(): the optimizer updates parameters in backward() (update_in_backward()), and keeps no gradients for "
        "a later one",
        "do without update_in_backward()");
  ++no_sync_;
  ++quiet;
}

void DistributedDataParallel::Impl::leave_no_sync() {
  --no_sync_;
  --quiet;
}

void DistributedDataParallel::Impl::begin_company(bool divide_by_active) {
  comm::StepIdentity step{.stop_requested = group_.step_identity().stop_requested};
  step.joined = true;
  step.divide_by_active = divide_by_active;
  exchange_->begin(step, pack_along());
}

bool DistributedDataParallel::Impl::end_company() {
  /// Gradients of a rank that does not train any more are not wanted.
  class Nowhere final : public comm::Sink {
    void take(std::size_t, const at::Tensor&) override {}
  } nowhere;
  const at::NoGradGuard no_grad;
  const comm::Attendance attendance =
      leaves_gradients() ? exchange_->pieces()->finish_pieces(*updated_) : exchange_->finish(nowhere);
  if (attendance.stop_requested) group_.agree_to_stop();
  if (attendance.active == 0) return false;
  buffers_.unpack(group_.size());
  anyone_joined_ = true;
  last_active_ = attendance.first;
  ++exchanges_;
  return true;
}

void DistributedDataParallel::Impl::end_join() {
  if (!std::exchange(anyone_joined_, false)) return;
  broadcast_tensors(all_tensors_, group_, last_active_);
  const at::Tensor steps = at::scalar_tensor(group_.steps(), at::kLong);
  group_.broadcast(steps, last_active_, {.name = "steps"});
  group_.catch_up(steps.item<std::int64_t>());
}

void DistributedDataParallel::Impl::abandon(const std::string& why) noexcept { exchange_->abandon(why); }

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module, comm::Group group, DdpOptions options)
    : impl_(std::make_shared<Impl>(module, std::move(group), std::move(options))) {}
DistributedDataParallel::~DistributedDataParallel() {
  if (impl_) impl_->close();
}
DistributedDataParallel::DistributedDataParallel(DistributedDataParallel&&) noexcept = default;
void DistributedDataParallel::average_hosts() { impl_->average_hosts(); }
comm::Group& DistributedDataParallel::group() { return impl_->group(); }
comm::ExchangeStats DistributedDataParallel::stats() const { return impl_->stats(); }

DistributedDataParallel::operator std::shared_ptr<GradientSource>() const { return impl_; }

DistributedDataParallel::NoSync::NoSync(DistributedDataParallel& ddp) : ddp_(ddp) { ddp_.impl_->enter_no_sync(); }
DistributedDataParallel::NoSync::~NoSync() { ddp_.impl_->leave_no_sync(); }

}  // namespace lockstep::ddp
