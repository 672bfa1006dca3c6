#include "lockstep/checkpoint/module_io.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>

#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"

namespace lockstep::checkpoint {
namespace {

constexpr std::string_view kDdpPrefix = "module.";
constexpr std::size_t kMaxNamesShown = 5;

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.numel() > 0 && a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() &&
                          a.strides() == b.strides() && a.scalar_type() == b.scalar_type());
}

// Mismatches of one kind: counts all and lists the first few.
class MismatchList {
 public:
  void add(const std::string& text) {
    if (++count_ <= kMaxNamesShown) shown_ += (count_ == 1 ? "" : ", ") + text;
  }
  bool has_any() const { return count_ > 0; }
  // Returns "2 missing ("a", "b"); ", or "" if there are none.
  std::string summary(const char* kind) const {
    if (count_ == 0) return "";
    return std::to_string(count_) + " " + kind + " (" + shown_ + (count_ > kMaxNamesShown ? ", ..." : "") + "); ";
  }

 private:
  std::size_t count_ = 0;
  std::string shown_;
};

std::string shape_text(at::IntArrayRef shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

std::string dtype_text(c10::ScalarType type) {
  const SafetensorsDtype* const dtype = find_dtype(type);
  return dtype ? std::string(dtype->name) : c10::toString(type);
}

// The tensors of a file, independent of its format.
struct TensorSource {
  struct Entry {
    std::vector<std::int64_t> shape;
    c10::ScalarType type;
  };
  std::map<std::string, Entry> entries;
  std::function<at::Tensor(const std::string&)> read;
  std::map<std::string, std::string> metadata;
};

TensorSource open_safetensors(const std::string& path, const LoadOptions& options) {
  const auto reader = std::make_shared<SafetensorsReader>(path, ReadOptions{.verify = options.verify});
  TensorSource source{{}, [reader](const std::string& name) { return reader->read(name); }, reader->metadata()};
  for (const auto& [name, entry] : reader->tensors())
    source.entries.emplace(name, TensorSource::Entry{entry.shape, entry.dtype->type});
  return source;
}

[[noreturn]] void throw_no_module(const std::string& path, const std::string& what) {
  throw base::UsageError("cannot load " + path + ": it contains " + what +
                             "; expected a state_dict of named tensors, or a module of torch::save()",
                         "use load_torch_file() to read everything in it", base::Cause::kBadFile);
}

// A module has the names of its tensors and of its submodules; a state_dict has complete names.
void add_tensors(const Dict& dict, const std::string& prefix, const std::string& path, TensorMap& tensors) {
  for (const auto& item : dict.items) {
    const auto* const key = item.key.as<std::string>();
    const auto* const tensor = item.value.as<at::Tensor>();
    const auto* const submodule = item.value.as<Dict>();
    if (!key) throw_no_module(path, "a dictionary with a key that is " + std::string(kind_of(item.key)));
    const std::string name = prefix + *key;
    if (dict.module && submodule && submodule->module)
      add_tensors(*submodule, name + ".", path, tensors);
    else if (!tensor)
      throw_no_module(path, std::string(kind_of(item.value)) + " under the name " + base::quoted(name, 80));
    else if (!tensors.emplace(name, *tensor).second)
      throw_no_module(path, "two tensors under the name " + base::quoted(name, 80));
  }
}

TensorSource open_torch_file(const std::string& path, const LoadOptions& options) {
  const Value value = load_torch_file(path, {.verify = options.verify});
  const auto* const dict = value.as<Dict>();
  if (!dict) throw_no_module(path, std::string(kind_of(value)));
  if (dict->module && dict->find("param_groups"))
    throw base::UsageError("cannot load " + path + ": it contains an optimizer; expected a module",
                           "use torch::load(optimizer, path)", base::Cause::kBadFile);
  const auto tensors = std::make_shared<TensorMap>();
  add_tensors(*dict, "", path, *tensors);
  TensorSource source{{}, [tensors](const std::string& name) { return tensors->at(name); }, {}};
  for (const auto& [name, tensor] : *tensors)
    source.entries.emplace(name, TensorSource::Entry{tensor.sizes().vec(), tensor.scalar_type()});
  return source;
}

// The plan of load(): pairs of a name in the file and a tensor of the module to copy to, and the mismatches.
struct LoadPlan {
  std::vector<std::pair<std::string, at::Tensor>> pairs;
  LoadReport report;
  MismatchList shape_mismatches;
  MismatchList dtype_mismatches;
};

std::string prefix_to_skip(const std::map<std::string, TensorSource::Entry>& entries, const TensorMap& state) {
  const auto has_prefix = [](const auto& item) { return item.first.starts_with(kDdpPrefix); };
  const bool is_wrapped = !entries.empty() && std::all_of(entries.begin(), entries.end(), has_prefix) &&
                          std::none_of(state.begin(), state.end(), has_prefix);
  return std::string(is_wrapped ? kDdpPrefix : "");
}

LoadPlan plan_load(const std::map<std::string, TensorSource::Entry>& entries, const TensorMap& state,
                   const LoadOptions& options) {
  LoadPlan plan;
  const std::string prefix = prefix_to_skip(entries, state);
  for (const auto& [name, entry] : entries) {
    const auto found = state.find(name.substr(prefix.size()));
    if (found == state.end()) {
      plan.report.unexpected.push_back(name);
      continue;
    }
    const at::Tensor& tensor = found->second;
    if (tensor.sizes() != at::IntArrayRef(entry.shape))
      plan.shape_mismatches.add(base::quoted(name, 80) + " " + shape_text(entry.shape) + " in the file, " +
                                shape_text(tensor.sizes()) + " in the module");
    else if (tensor.scalar_type() != entry.type && !options.convert_dtype)
      plan.dtype_mismatches.add(base::quoted(name, 80) + " " + dtype_text(entry.type) + " in the file, " +
                                dtype_text(tensor.scalar_type()) + " in the module");
    else
      plan.pairs.emplace_back(name, tensor);
  }
  for (const auto& [name, tensor] : state) {
    if (entries.contains(prefix + name)) continue;
    const bool is_tied = std::any_of(plan.pairs.begin(), plan.pairs.end(), [&tensor = tensor](const auto& pair) {
      return is_same_memory(pair.second, tensor);
    });
    if (!is_tied) plan.report.missing.push_back(name);
  }
  return plan;
}

void check_plan(const LoadPlan& plan, const std::string& path, const LoadOptions& options) {
  MismatchList missing, unexpected;
  if (options.strict) {
    for (const auto& name : plan.report.missing) missing.add(base::quoted(name, 80));
    for (const auto& name : plan.report.unexpected) unexpected.add(base::quoted(name, 80));
  }
  const std::string all = missing.summary("missing in the file") + unexpected.summary("unexpected in the file") +
                          plan.shape_mismatches.summary("with another shape") +
                          plan.dtype_mismatches.summary("with another dtype");
  if (all.empty()) return;
  const char* hint = "set LoadOptions.strict = false to skip names that exist on one side only";
  if (plan.dtype_mismatches.has_any()) hint = "set LoadOptions.convert_dtype = true to convert the values";
  if (plan.shape_mismatches.has_any())
    hint = "check that the file belongs to this model and that the model has the same sizes";
  throw base::UsageError("cannot load " + path + ": it does not match the module: " + all.substr(0, all.size() - 2),
                         hint, base::Cause::kBadFile);
}

}  // namespace

TensorMap module_state(const torch::nn::Module& module) {
  TensorMap state;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (!item.value().defined()) continue;
      if (!state.emplace(item.key(), item.value()).second)
        throw base::UsageError("the module has a parameter and a buffer named " + base::quoted(item.key(), 80) +
                               "; expected unique names");
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return state;
}

void save(nn::ConstModuleRef module, const std::string& path, const SaveOptions& options) {
  const TensorMap state = module_state(*module);
  if (!has_torch_extension(path)) return save_tensors(state, path, options);
  if (!options.metadata.empty())
    throw base::UsageError(
        "cannot save " + path +
        ": PyTorch files have no metadata; expected empty SaveOptions.metadata, or a name without .pt or .pth");
  Dict dict{{}, true};
  for (const auto& [name, tensor] : state) dict.add(name, tensor.detach());
  save_torch_file(dict, path);
}

LoadReport load(nn::ModuleRef module, const std::string& path, const LoadOptions& options) {
  TensorSource source = is_torch_file(path) ? open_torch_file(path, options) : open_safetensors(path, options);
  LoadPlan plan = plan_load(source.entries, module_state(*module), options);
  check_plan(plan, path, options);
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : plan.pairs) values.push_back(source.read(name));
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < values.size(); ++i) plan.pairs[i].second.copy_(values[i]);
  plan.report.metadata = std::move(source.metadata);
  return std::move(plan.report);
}

}  // namespace lockstep::checkpoint
