// A table of the submodules and parameters of a module.
#pragma once

#include <string>

#include "lockstep/nn/module_ref.h"

namespace lockstep::nn {

/// Returns one line per submodule down to `depth`, with its type, the number of its parameters and their memory,
/// including its own submodules; then a total, with the memory of gradients and buffers. Shared parameters count once
/// per line. Does not count the optimizer's state or activations saved for backward(). Pure.
std::string module_summary(nn::ConstModuleRef module, int depth = 1);

}  // namespace lockstep::nn
