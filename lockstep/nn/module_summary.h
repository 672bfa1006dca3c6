// What a module consists of, as a table.
#pragma once

#include <string>

namespace torch::nn {
class Module;
}

namespace lockstep::train {

/// A line for each submodule down to `depth`, with its kind, the number of its parameters and what they take, those of
/// its own submodules with them; then all together, with what gradients and buffers take. Shared parameters count once
/// in each line. Not counted: the optimizer's state, and what a forward keeps for the backward. Pure.
std::string module_summary(const torch::nn::Module& module, int depth = 1);

}  // namespace lockstep::train
