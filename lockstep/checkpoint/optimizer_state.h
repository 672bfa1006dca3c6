// The state of torch's optimizers under the names of the parameters, and in the form of Python's
// optimizer.state_dict().
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/checkpoint/torch_file/value.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep::checkpoint {

/// "fc.weight.exp_avg", "fc.weight.step" ... of each parameter that was updated, and "group.0.lr" ... of each group: of
/// torch's Adam, AdamW, SGD, RMSprop and Adagrad. The names are those of `module`, so it does not matter in which order
/// another program gives the parameters to its optimizer. Tensors are those that the optimizer uses. The optimizers of
/// lockstep::optim have a state_dict() of their own. Waits for nobody. Throws UsageError for another optimizer, and for
/// a parameter that `module` does not have.
StateDict optimizer_state_dict(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

/// The reverse; values are copied, to the devices of the parameters. Throws UsageError for names that are missing or
/// unknown, for values of another type, and for tensors of another shape than their parameter: nothing has changed
/// then.
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                               const StateDict& state);

/// The same for an optimizer whose parameters are no module's, as copies in float32 (amp::MasterWeights), by these
/// names.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;
StateDict optimizer_state_dict(const torch::optim::Optimizer& optimizer, const NamedParameters& parameters);
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                               const StateDict& state);

/// What optimizer.state_dict() is in Python, of an optimizer of the same class whose parameters are in the same order:
/// "state" by their numbers, and "param_groups". Python's load_state_dict() takes it.
Value python_optimizer_state(const torch::optim::Optimizer& optimizer);

/// The reverse. Options that C++ does not have are passed over (foreach, fused, initial_lr ...), but for maximize,
/// which is refused. Throws UsageError as above.
void load_python_optimizer_state(torch::optim::Optimizer& optimizer, const Value& state);

}  // namespace lockstep::checkpoint
