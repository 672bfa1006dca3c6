// A module's parameters and buffers in a file, of safetensors or of PyTorch, under the names that the user gave them.
#pragma once

#include <concepts>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/safetensors/safetensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep::checkpoint {

struct LoadOptions {
  bool strict = true;          ///< false: names that only one side has are passed over, and reported
  bool convert_dtype = false;  ///< true: values of another dtype are converted instead of refused
  bool verify = true;          ///< false: hashes that the file carries are not looked at
};

/// What load() passed over; both lists are empty when it was strict.
struct LoadReport {
  std::vector<std::string> missing;     ///< names of the module that the file does not have
  std::vector<std::string> unexpected;  ///< names of the file that the module does not have
  std::map<std::string, std::string> metadata;
};

/// Writes all parameters and buffers of `module`: the names are those of named_parameters() and named_buffers(), as
/// Python's state_dict() has them, so PyTorch reads the file: as safetensors, or, where `path` ends with ".pt" or
/// ".pth", by torch.load(path, weights_only=True) (save_torch_file(); it takes no metadata). Tied parameters are
/// written under each of their names. Waits for the disk only, never for other ranks. Throws as save_tensors() or
/// save_torch_file(), and UsageError when a parameter and a buffer share a name.
void save(const torch::nn::Module& module, const std::string& path, const SaveOptions& options = {});

/// Copies the values of a file of safetensors, or of torch.save(a state_dict) in Python, which its first bytes tell,
/// into the parameters and buffers that `module` has: the tensors stay the same objects, on their devices, so
/// optimizers that know them go on working. When all names of the file begin with "module." (a file of PyTorch's
/// DistributedDataParallel) and none of the module's do, that prefix is left out. A name that is missing is no
/// difference when it is tied to one that is there.
///
/// Everything is checked and read before the first value is copied: after an error the module is as it was. Throws as
/// SafetensorsReader or load_torch_file(), and UsageError (cause kBadFile) listing the first five names that are
/// missing, unexpected, of another shape (never passed over) or of another dtype. Memory: that of the file.
LoadReport load(torch::nn::Module& module, const std::string& path, const LoadOptions& options = {});

/// What holds a module: a ModuleHolder (made by TORCH_MODULE), a std::shared_ptr, a plain pointer.
template <typename H>
concept ModuleHandle = requires(H& holder) {
  { *holder } -> std::convertible_to<const torch::nn::Module&>;
};

namespace detail {
template <typename H>
auto& module_of(H& holder) {
  if constexpr (requires { holder.is_empty(); }) {
    if (holder.is_empty()) throw base::UsageError("the module holder is empty; allowed is one that holds a module");
  } else if constexpr (requires { holder == nullptr; }) {
    if (holder == nullptr)
      throw base::UsageError("the pointer to a module is null; allowed is one that points to a module");
  }
  return *holder;
}
}  // namespace detail

template <ModuleHandle H>
void save(const H& holder, const std::string& path, const SaveOptions& options = {}) {
  save(static_cast<const torch::nn::Module&>(detail::module_of(holder)), path, options);
}

template <typename H>
  requires ModuleHandle<std::remove_reference_t<H>>
LoadReport load(H&& holder, const std::string& path, const LoadOptions& options = {}) {
  return load(static_cast<torch::nn::Module&>(detail::module_of(holder)), path, options);
}

}  // namespace lockstep::checkpoint
