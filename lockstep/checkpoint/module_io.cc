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

constexpr std::string_view kWrapper = "module.";
constexpr std::size_t kNamesShown = 5;

TensorMap state_of(const torch::nn::Module& module) {
  TensorMap state;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (!item.value().defined()) continue;
      if (!state.emplace(item.key(), item.value()).second)
        throw base::UsageError("the module has a parameter and a buffer of the name " + base::quoted(item.key(), 80) +
                               "; allowed is one of them");
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return state;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.numel() > 0 && a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() &&
                          a.strides() == b.strides() && a.scalar_type() == b.scalar_type());
}

// Differences of one kind: all are counted, the first few shown.
class Differences {
 public:
  void add(const std::string& text) {
    if (++count_ <= kNamesShown) shown_ += (count_ == 1 ? "" : ", ") + text;
  }
  bool any() const { return count_ > 0; }
  // "2 missing ("a", "b"); " or nothing.
  std::string said(const char* kind) const {
    if (count_ == 0) return "";
    return std::to_string(count_) + " " + kind + " (" + shown_ + (count_ > kNamesShown ? ", ..." : "") + "); ";
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
  const Dtype* const dtype = find_dtype(type);
  return dtype ? std::string(dtype->name) : c10::toString(type);
}

// What a file has, whatever its format is.
struct Source {
  struct Entry {
    std::vector<std::int64_t> shape;
    c10::ScalarType type;
  };
  std::map<std::string, Entry> entries;
  std::function<at::Tensor(const std::string&)> read;
  std::map<std::string, std::string> metadata;
};

Source from_safetensors(const std::string& path, const LoadOptions& options) {
  const auto reader = std::make_shared<SafetensorsReader>(path, ReadOptions{.verify = options.verify});
  Source source{{}, [reader](const std::string& name) { return reader->read(name); }, reader->metadata()};
  for (const auto& [name, entry] : reader->tensors())
    source.entries.emplace(name, Source::Entry{entry.shape, entry.dtype->type});
  return source;
}

Source from_torch_file(const std::string& path, const LoadOptions& options) {
  const auto refuse = [&](const std::string& what) {
    throw base::UsageError(path + " holds " + what + "; allowed is a state_dict: tensors under their names",
                           "load_torch_file() gives all that is in it", base::Cause::kBadFile);
  };
  const Value value = load_torch_file(path, {.verify = options.verify});
  const auto* const dict = value.as<Dict>();
  if (!dict) refuse(std::string(kind_of(value)));
  const auto tensors = std::make_shared<TensorMap>();
  Source source{{}, [tensors](const std::string& name) { return tensors->at(name); }, {}};
  for (const auto& item : dict->items) {
    const auto* const name = item.key.as<std::string>();
    const auto* const tensor = item.value.as<at::Tensor>();
    if (!name) refuse("a dictionary with a key that is " + std::string(kind_of(item.key)));
    if (!tensor) refuse(std::string(kind_of(item.value)) + " under the name " + base::quoted(*name, 80));
    source.entries.emplace(*name, Source::Entry{tensor->sizes().vec(), tensor->scalar_type()});
    tensors->emplace(*name, *tensor);
  }
  return source;
}

// What goes where: pairs of a name in the file and a tensor of the module; and what fits nowhere.
struct Matching {
  std::vector<std::pair<std::string, at::Tensor>> pairs;
  LoadReport report;
  Differences shapes;
  Differences dtypes;
};

std::string prefix_to_skip(const std::map<std::string, Source::Entry>& entries, const TensorMap& state) {
  const auto wrapped = [](const auto& item) { return item.first.starts_with(kWrapper); };
  const bool skip = !entries.empty() && std::all_of(entries.begin(), entries.end(), wrapped) &&
                    std::none_of(state.begin(), state.end(), wrapped);
  return std::string(skip ? kWrapper : "");
}

Matching match(const std::map<std::string, Source::Entry>& entries, const TensorMap& state,
               const LoadOptions& options) {
  Matching matching;
  const std::string prefix = prefix_to_skip(entries, state);
  for (const auto& [name, entry] : entries) {
    const auto found = state.find(name.substr(prefix.size()));
    if (found == state.end()) {
      matching.report.unexpected.push_back(name);
      continue;
    }
    const at::Tensor& tensor = found->second;
    if (tensor.sizes() != at::IntArrayRef(entry.shape))
      matching.shapes.add(base::quoted(name, 80) + " " + shape_text(entry.shape) + " in the file, " +
                          shape_text(tensor.sizes()) + " in the module");
    else if (tensor.scalar_type() != entry.type && !options.convert_dtype)
      matching.dtypes.add(base::quoted(name, 80) + " " + dtype_text(entry.type) + " in the file, " +
                          dtype_text(tensor.scalar_type()) + " in the module");
    else
      matching.pairs.emplace_back(name, tensor);
  }
  for (const auto& [name, tensor] : state) {
    if (entries.contains(prefix + name)) continue;
    const bool tied = std::any_of(matching.pairs.begin(), matching.pairs.end(),
                                  [&tensor = tensor](const auto& pair) { return same_memory(pair.second, tensor); });
    if (!tied) matching.report.missing.push_back(name);
  }
  return matching;
}

void check(const Matching& matching, const std::string& path, const LoadOptions& options) {
  Differences missing, unexpected;
  if (options.strict) {
    for (const auto& name : matching.report.missing) missing.add(base::quoted(name, 80));
    for (const auto& name : matching.report.unexpected) unexpected.add(base::quoted(name, 80));
  }
  const std::string all = missing.said("missing in the file") + unexpected.said("unexpected in the file") +
                          matching.shapes.said("of another shape") + matching.dtypes.said("of another dtype");
  if (all.empty()) return;
  const char* hint = "LoadOptions.strict = false passes over names that only one side has";
  if (matching.dtypes.any()) hint = "LoadOptions.convert_dtype = true converts values";
  if (matching.shapes.any()) hint = "the file is of another model, or of one with other sizes";
  throw base::UsageError(path + " does not fit the module: " + all.substr(0, all.size() - 2), hint,
                         base::Cause::kBadFile);
}

}  // namespace

void save(const torch::nn::Module& module, const std::string& path, const SaveOptions& options) {
  const TensorMap state = state_of(module);
  if (!names_torch_file(path)) return save_tensors(state, path, options);
  if (!options.metadata.empty())
    throw base::UsageError(
        "cannot save " + path +
        " with SaveOptions.metadata: files of PyTorch have none; allowed is another name than .pt and .pth");
  Dict dict{{}, true};
  for (const auto& [name, tensor] : state) dict.add(name, tensor.detach());
  save_torch_file(dict, path);
}

LoadReport load(torch::nn::Module& module, const std::string& path, const LoadOptions& options) {
  Source source = is_torch_file(path) ? from_torch_file(path, options) : from_safetensors(path, options);
  Matching matching = match(source.entries, state_of(module), options);
  check(matching, path, options);
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : matching.pairs) values.push_back(source.read(name));
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < values.size(); ++i) matching.pairs[i].second.copy_(values[i]);
  matching.report.metadata = std::move(source.metadata);
  return std::move(matching.report);
}

}  // namespace lockstep::checkpoint
