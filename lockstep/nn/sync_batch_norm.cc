#include "lockstep/nn/sync_batch_norm.h"

#include <ATen/Functions.h>
#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "lockstep/nn/sync_batch_norm_function.h"

namespace lockstep::nn {
namespace {

// For convert_sync_batch_norm(). BatchNorm::forward() is not virtual, and modules that users hold as typed members
// cannot be replaced from outside; but all of them call the operator aten::batch_norm with the module's own tensors.

constexpr const char* kMarkerName = "sync_batch_norm";

struct ConvertedNorm {
  comm::Group group;
  std::string name;
  at::Tensor key;  // kept alive, so that no other tensor gets its address
};

/// A child of a converted module: has the same lifetime and training mode.
class ConversionMarker final : public torch::nn::Module {
 public:
  explicit ConversionMarker(ConvertedNorm converted) : converted_(std::move(converted)) {}
  ~ConversionMarker() override;
  ConversionMarker(const ConversionMarker&) = delete;
  ConversionMarker& operator=(const ConversionMarker&) = delete;

  bool is_serializable() const override { return false; }
  void pretty_print(std::ostream& stream) const override { stream << "over group " << converted_.group.name(); }
  const ConvertedNorm& converted() const { return converted_; }
  const c10::TensorImpl* key() const { return converted_.key.unsafeGetTensorImpl(); }

 private:
  const ConvertedNorm converted_;
};

/// Maps key tensors to the markers of their modules. Thread-safe.
class MarkerRegistry {
 public:
  void add(const std::shared_ptr<ConversionMarker>& marker) {
    const std::unique_lock lock(mutex_);
    markers_[marker->key()] = marker;
  }
  void remove(const ConversionMarker& marker) {
    const std::unique_lock lock(mutex_);
    const auto found = markers_.find(marker.key());
    if (found != markers_.end() && found->second.expired())
      markers_.erase(found);  // if not, a newer marker has replaced it
  }
  std::shared_ptr<ConversionMarker> find(const at::Tensor& key) const {
    const std::shared_lock lock(mutex_);
    const auto found = markers_.find(key.unsafeGetTensorImpl());
    return found == markers_.end() ? nullptr : found->second.lock();
  }

 private:
  mutable std::shared_mutex mutex_;  // guards markers_
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<ConversionMarker>> markers_;
};

MarkerRegistry& marker_registry() {
  static MarkerRegistry& all = *new MarkerRegistry;  // never destroyed, because modules may outlive static objects
  return all;
}

ConversionMarker::~ConversionMarker() { marker_registry().remove(*this); }

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                      double momentum, double eps, bool cudnn_enabled) {
  const auto given = [](const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); };
  if (training) {
    const at::Tensor key = given(given(running_mean).defined() ? running_mean : weight);
    const auto marker = key.defined() ? marker_registry().find(key) : nullptr;
    if (marker && marker->is_training())
      return apply_sync_batch_norm(input, given(weight), given(bias),
                                   {marker->converted().group, marker->converted().name, given(running_mean),
                                    given(running_var), momentum, eps});
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
}

/// Registers kernels for aten::batch_norm. torch has one composite kernel for all dispatch keys; kernels of a specific
/// key take precedence. The device keys are needed in inference mode.
void override_batch_norm() {
  static const auto libraries = [] {
    std::vector<std::unique_ptr<torch::Library>> made;
    for (const auto key : {c10::DispatchKey::Autograd, c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      made.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
      made.back()->impl("batch_norm", TORCH_FN(batch_norm));
    }
    return made;
  }();
  static_cast<void>(libraries);
}

/// The tensor that identifies calls of a BatchNorm; undefined if it has none. nullopt if `module` is not a BatchNorm.
std::optional<at::Tensor> key_of(const torch::nn::Module& module) {
  const auto key = [](const auto& norm) { return norm.running_mean.defined() ? norm.running_mean : norm.weight; };
  if (const auto* norm = dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module)) return key(*norm);
  if (const auto* norm = dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module)) return key(*norm);
  if (const auto* norm = dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module)) return key(*norm);
  return std::nullopt;
}

struct FoundNorm {
  std::string name;
  torch::nn::Module* module;
  at::Tensor key;
};

void find_norms(const std::string& name, torch::nn::Module& module, std::vector<FoundNorm>& found) {
  if (auto key = key_of(module)) found.push_back({name.empty() ? "BatchNorm" : name, &module, *key});
  for (const auto& child : module.named_children())
    find_norms(name.empty() ? child.key() : name + "." + child.key(), *child.value(), found);
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(comm::Group group, const torch::nn::BatchNormOptions& norm, std::string name)
    : NormImplBase(norm), group_(std::move(group)), name_(std::move(name)) {}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  const bool tracks = is_training() && options.track_running_stats();
  if (tracks) num_batches_tracked += 1;
  if (!is_training())
    return at::batch_norm(input, weight, bias, running_mean, running_var, !options.track_running_stats(),
                          /*momentum=*/0, options.eps(),
                          /*cudnn_enabled=*/true);
  double momentum = options.momentum().value_or(0);
  if (tracks && !options.momentum()) momentum = 1.0 / num_batches_tracked.item<double>();
  return apply_sync_batch_norm(input, weight, bias,
                               {group_, name_, running_mean, running_var, momentum, options.eps()});
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() >= 2 && input.size(1) == options.num_features() && at::isFloatingType(input.scalar_type())) return;
  std::ostringstream got;
  got << input.scalar_type() << input.sizes();
  throw base::UsageError(name_ + ": the input is " + got.str() + "; expected (N, " +
                         std::to_string(options.num_features()) + ", ...) with a floating-point dtype");
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::nn::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  if (options.momentum())
    stream << *options.momentum();
  else
    stream << "None";
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
         << ", group=" << group_.name() << ')';
}

int convert_sync_batch_norm(ModuleRef module, const comm::Group& group) {
  std::vector<FoundNorm> norms;
  find_norms("", *module, norms);
  if (norms.empty())
    throw base::UsageError("convert_sync_batch_norm(): " + module->name() +
                           " contains no BatchNorm1d, BatchNorm2d or BatchNorm3d; expected at least one");
  for (const FoundNorm& norm : norms) {
    if (!norm.key.defined())
      throw base::UsageError("convert_sync_batch_norm(): " + norm.name +
                                 " has neither a weight nor running statistics, which would identify its calls",
                             "use a lockstep::nn::SyncBatchNorm instead");
  }
  override_batch_norm();
  for (const FoundNorm& norm : norms) {
    if (norm.module->named_children().contains(kMarkerName)) norm.module->unregister_module(kMarkerName);
    const auto marker = std::make_shared<ConversionMarker>(ConvertedNorm{group, norm.name, norm.key});
    marker->train(norm.module->is_training());
    norm.module->register_module(kMarkerName, marker);
    marker_registry().add(marker);
  }
  return static_cast<int>(norms.size());
}

bool has_sync_batch_norm(ConstModuleRef module) {
  if (dynamic_cast<const ConversionMarker*>(&*module) || dynamic_cast<const SyncBatchNormImpl*>(&*module)) return true;
  for (const auto& child : module->children())
    if (has_sync_batch_norm(child)) return true;
  return false;
}

}  // namespace lockstep::nn
