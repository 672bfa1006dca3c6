// Converts the state of torch's optimizers to a StateDict with parameter names, and to the form of Python's
// optimizer.state_dict().
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/checkpoint/torch_file/value.h"
#include "lockstep/nn/module_ref.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::checkpoint {

/// Returns the state of torch's Adam, AdamW, SGD, RMSprop or Adagrad: "fc.weight.exp_avg", "fc.weight.step" ... for
/// each parameter that was updated, and "group.0.lr" ... for each parameter group. The names are those of `module`, so
/// another program may pass the parameters to its optimizer in another order. The tensors are those that the optimizer
/// uses. The optimizers of lockstep::optim have their own state_dict(). Not collective. Throws UsageError for another
/// optimizer, and for a parameter that `module` does not have.
StateDict optimizer_state_dict(const torch::optim::Optimizer& optimizer, nn::ConstModuleRef module);

/// Loads what optimizer_state_dict() returned; copies the values to the parameters' devices. Throws UsageError for
/// missing or unknown names, for values of another type, and for tensors whose shape differs from their parameter's;
/// the optimizer is then unchanged.
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, nn::ConstModuleRef module, const StateDict& state);

/// The same for an optimizer whose parameters belong to no module, such as float32 copies (amp::MasterWeights), with
/// explicit names.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;
StateDict optimizer_state_dict(const torch::optim::Optimizer& optimizer, const NamedParameters& parameters);
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                               const StateDict& state);

/// Returns the options of each parameter group, "group.0.lr", "group.0.weight_decay" and so on, of an optimizer of
/// torch or of lockstep::optim. Only the learning rates for a class that optimizer_state_dict() does not support.
StateDict optimizer_options(const torch::optim::Optimizer& optimizer);

/// Returns what optimizer.state_dict() returns in Python for an optimizer of the same class with the parameters in the
/// same order: "state" by parameter number, and "param_groups". Python's load_state_dict() accepts it.
Value python_optimizer_state(const torch::optim::Optimizer& optimizer);

/// Loads a state_dict() of Python. Options that C++ does not have are ignored (foreach, fused, initial_lr ...), except
/// maximize=True, which is an error. Throws UsageError as load_optimizer_state_dict() does.
void load_python_optimizer_state(torch::optim::Optimizer& optimizer, const Value& state);

}  // namespace lockstep::checkpoint
