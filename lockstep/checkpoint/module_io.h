// Saves and loads a module's parameters and buffers, as safetensors or as a PyTorch file.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/nn/module_ref.h"

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
void save(nn::ConstModuleRef module, const std::string& path, const SaveOptions& options = {});

/// Copies the values of a file into the parameters and buffers of `module`. The file is safetensors, the result of
/// torch.save(state_dict) in Python, or that of torch::save(module, path) in C++; its contents decide which. The
/// tensors stay the same objects on their devices, so optimizers that reference them remain valid. If all names in the
/// file begin with "module." (a file of PyTorch's DistributedDataParallel) and none of the module's names do, the
/// prefix is removed. A missing name is not an error if its tensor is tied to one that is present.
///
/// Everything is checked and read before the first value is copied: after an error the module is unchanged. Throws as
/// SafetensorsReader or load_torch_file() does, and UsageError (cause kBadFile), which lists the first five names that
/// are missing, unexpected, of another shape (always an error) or of another dtype. Memory: that of the file.
LoadReport load(nn::ModuleRef module, const std::string& path, const LoadOptions& options = {});

/// Returns the parameters and the defined buffers by name, which are the module's own tensors. Throws UsageError for a
/// name that occurs twice.
TensorMap module_state(const torch::nn::Module& module);

}  // namespace lockstep::checkpoint
