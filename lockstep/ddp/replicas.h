// Makes the replicas of a model and of its optimizer equal, and finds differences between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/nn/module_ref.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::ddp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The parameters (or buffers) of `module` with their names. A tensor with several names is listed once, under the
/// first.
NamedTensors named_parameters(torch::nn::Module& module);
NamedTensors named_buffers(torch::nn::Module& module);

/// The tensors of a model. A tensor must not be listed twice.
struct ModelTensors {
  NamedTensors parameters, buffers;
  /// False: all ranks hold the values that they should have, and a graph may need them: rank 0's are not copied to all.
  bool broadcast = true;
};

/// Copies `values` into `tensor`, in place. Elements of `tensor` that share memory, because it was expanded, get one of
/// their values.
void copy_values(const at::Tensor& values, const at::Tensor& tensor);

/// Compares names, shapes, strides, dtypes, device types and requires_grad of the tensors, and `options`, between the
/// ranks. On a difference every rank throws CommError kConfigMismatch with both ranks' values of the first one. Blocks
/// until all ranks have called it.
void compare_models(const NamedTensors& parameters, const NamedTensors& buffers, const std::string& options,
                    const comm::Group& group);

/// Throws UsageError, which begins with `operation`, for a tensor that is sparse.
void require_dense(const NamedTensors& tensors, const std::string& kind, const std::string& operation);

/// Overwrites the tensors in place with those of rank `root`, packed into messages of at most 32 MiB. Afterwards all
/// ranks hold the same bits. Blocks until all ranks have called it.
void broadcast_tensors(const NamedTensors& tensors, const comm::Group& group, int root = 0);

/// Copies the parameters and buffers of rank `root` to every rank. Blocks until all ranks have called it. Throws
/// UsageError for a sparse tensor.
void broadcast_parameters(nn::ModuleRef module, const comm::Group& group, int root = 0);

/// Copies the state and options of rank `root`'s optimizer to every rank, through the optimizer's own save() and
/// load(). Needed for optimizers whose state derives from initial parameters (Lookahead, EMA, master weights) and that
/// were constructed before the parameters were equal. Sends tensors and numbers, never a pickle. Blocks until all ranks
/// have called it. Throws UsageError on rank `root` for state of any other type.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, const comm::Group& group, int root = 0);

/// A 64-bit hash (XXH3) of each tensor's values in memory order. Values on a GPU are copied to the host in slices of at
/// most 32 MiB, which blocks until the GPU has computed them.
std::vector<std::int64_t> hash_tensors(const NamedTensors& tensors);

/// Describes the first tensor whose hashes differ between ranks; returns "" if there is none. `all` holds the hashes of
/// each rank in the order of `ranks`, which are world ranks. Sets `outlier_rank` to a rank of the smallest set of ranks
/// with equal hashes. Pure.
std::string describe_divergence(const NamedTensors& tensors, const std::vector<std::int64_t>& all,
                                const std::vector<int>& ranks, int& outlier_rank);

}  // namespace lockstep::ddp
