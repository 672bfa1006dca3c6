// DistributedDataParallel: hosts that train apart, DdpOptions.average_hosts_every and outer.
#include <exception>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {
namespace {

using base::UsageError;

constexpr int kAlwaysCompared = 8;  // the hosts compare their parameters after so many averages at first

}  // namespace

void DistributedDataParallel::Impl::make_host_averager() {
  host_link_.emplace(group_);
  host_averager_.emplace(options_.average_hosts_every, options_.outer, host_link_->exchange(options_.wire_dtype),
                         [this](const at::Tensor& mean, const at::Tensor& tensor) {
                           const at::Tensor& memory = memory_of(tensor);
                           copy_values(mean, memory);
                           if (!memory.is_same(tensor)) tensor.unsafeGetTensorImpl()->bump_version();
                         });
}

/// A write to a parameter bumps its version counter, so that a pending graph fails; a write to a buffer does not (see
/// BufferSync).
std::vector<at::Tensor> DistributedDataParallel::Impl::tensors_to_average(bool are_parameters) const {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = are_parameters ? 0 : num_parameters_;
       i < (are_parameters ? num_parameters_ : all_tensors_.size()); ++i) {
    const at::Tensor& tensor = all_tensors_[i].second;
    if (are_parameters && !tensor.is_floating_point() && !tensor.is_complex()) continue;
    tensors.push_back(tensor.requires_grad() ? tensor.detach() : tensor.data());
  }
  return tensors;
}

void DistributedDataParallel::Impl::average_hosts() {
  if (!host_averager_) return;
  host_averager_->average(tensors_to_average(true), tensors_to_average(false), true);
  if (host_check_ &&
      (num_averages_++ < kAlwaysCompared || num_reductions_ - hosts_compared_at_ >= options_.compare_replicas_every)) {
    host_check_->compare_now();
    hosts_compared_at_ = num_reductions_;
  }
  if (host_link_->has_several_hosts()) stop_requested_ = host_link_->any(stop_requested_, "stop requested");
  if (stop_requested_) comm::GroupAccess::set_stop_agreed(group_);
}

/// Ranks of a host may share the parameters, so none may go on before all have written them.
void DistributedDataParallel::Impl::with_global_copy(const std::function<void()>& body) {
  if (!host_averager_)
    throw UsageError("with_global_copy: the hosts do not train apart", "call what is to run without it");
  const std::vector<at::Tensor> parameters = tensors_to_average(true);
  const std::vector<at::Tensor> own = host_averager_->swap_in_copy(parameters);
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  reduce_group_.barrier({.name = "end of with_global_copy"});
  host_averager_->put_back(own, parameters);
  if (error) std::rethrow_exception(error);
}

checkpoint::StateDict DistributedDataParallel::Impl::outer_state() const {
  return host_averager_ ? host_averager_->state_dict() : checkpoint::StateDict();
}

void DistributedDataParallel::Impl::load_outer_state(const checkpoint::StateDict& state) {
  if (host_averager_) host_averager_->load_state_dict(state, tensors_to_average(true));
}

}  // namespace lockstep::ddp
