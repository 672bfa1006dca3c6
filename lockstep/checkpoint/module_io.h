// Saves and loads a module's parameters and buffers, as safetensors or as a PyTorch file.
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
  bool strict = true;          ///< false: names that exist on one side only are skipped and reported
  bool convert_dtype = false;  ///< true: values of another dtype are converted instead of rejected
  bool verify = true;          ///< false: the hashes in the file are not verified
};

/// The names that load() skipped; both lists are empty if LoadOptions::strict is true.
struct LoadReport {
  std::vector<std::string> missing;     ///< names in the module that the file does not have
  std::vector<std::string> unexpected;  ///< names in the file that the module does not have
  std::map<std::string, std::string> metadata;
};

/// Writes all parameters and buffers of `module` under the names of named_parameters() and named_buffers(), which are
/// those of Python's state_dict(), so PyTorch can read the file. A `path` that ends with ".pt" or ".pth" is written for
/// torch.load(path, weights_only=True) (save_torch_file(), which has no metadata), any other as safetensors. Tied
/// parameters are written once per name. Blocks on the disk only, not on other ranks. Throws as save_tensors() or
/// save_torch_file() does, and UsageError if a parameter and a buffer share a name.
void save(const torch::nn::Module& module, const std::string& path, const SaveOptions& options = {});

/// Copies the values of a file into the parameters and buffers of `module`. The file is safetensors or the result of
/// torch.save(state_dict) in Python; its first bytes decide which. The tensors stay the same objects on their devices,
/// so optimizers that reference them remain valid. If all names in the file begin with "module." (a file of PyTorch's
/// DistributedDataParallel) and none of the module's names do, the prefix is removed. A missing name is not an error if
/// its tensor is tied to one that is present.
///
/// Everything is checked and read before the first value is copied: after an error the module is unchanged. Throws as
/// SafetensorsReader or load_torch_file() does, and UsageError (cause kBadFile), which lists the first five names that
/// are missing, unexpected, of another shape (always an error) or of another dtype. Memory: that of the file.
LoadReport load(torch::nn::Module& module, const std::string& path, const LoadOptions& options = {});

/// A handle of a module: a ModuleHolder (declared by TORCH_MODULE), a std::shared_ptr or a raw pointer.
template <typename H>
concept ModuleHandle = requires(H& holder) {
  { *holder } -> std::convertible_to<const torch::nn::Module&>;
};

namespace detail {
template <typename H>
auto& module_of(H& holder) {
  if constexpr (requires { holder.is_empty(); }) {
    if (holder.is_empty()) throw base::UsageError("the module holder is empty; expected a module");
  } else if constexpr (requires { holder == nullptr; }) {
    if (holder == nullptr) throw base::UsageError("the module pointer is null; expected a module");
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
