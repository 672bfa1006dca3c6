// Making the replicas of a model, and of its optimizer, equal; and finding out where they are not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep::ddp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The parameters (buffers) of `module` with their names; a tensor that has several names comes once, with its first.
NamedTensors named_parameters(torch::nn::Module& module);
NamedTensors named_buffers(torch::nn::Module& module);

/// Compares names, shapes, strides, dtypes, devices and requires_grad of the tensors, and `options`, over the ranks.
/// The first difference is a CommError kConfigMismatch with both ranks' values, on every rank. Waits for all ranks.
void compare_models(const NamedTensors& parameters, const NamedTensors& buffers, const std::string& options,
                    comm::Group& group);

/// Overwrites the tensors with those of rank `root`, in place, packed into messages of at most 32 MiB. All ranks hold
/// `root`'s bits afterwards. Waits for all ranks.
void broadcast_tensors(const NamedTensors& tensors, comm::Group& group, int root = 0);

/// Gives every rank the parameters and buffers of rank `root`. Waits for all ranks.
void broadcast_parameters(torch::nn::Module& module, comm::Group& group, int root = 0);

/// Gives every rank the state and options of rank `root`'s optimizer, through the optimizer's own save() and load().
/// For optimizers whose state derives from initial parameters (Lookahead, EMA, master weights) and was made before the
/// parameters were equal. What travels is tensors and numbers, never a pickle. Waits for all ranks.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, comm::Group& group, int root = 0);

/// 64 bits (XXH3) of each tensor's values, in memory order. Those on a GPU are copied here piece by piece, which waits
/// for it.
std::vector<std::int64_t> hash_tensors(const NamedTensors& tensors);

/// `all` holds the hashes of each rank, which `ranks` names as the world does. The first tensor in which they differ,
/// and the rank that is alone or fewest, in words; "" when there is none. Pure. `odd` gets the rank.
std::string describe_divergence(const NamedTensors& tensors, const std::vector<std::int64_t>& all,
                                const std::vector<int>& ranks, int& outlier_rank);

}  // namespace lockstep::ddp
