#include "lockstep/ddp/module_watch.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep::ddp {
namespace {

[[noreturn]] void fail(bool is_buffer, const std::string& name, const std::string& what) {
  throw base::UsageError("DistributedDataParallel: " + std::string(is_buffer ? "buffer " : "parameter ") + name +
                             " was " + what + " after the DistributedDataParallel was made",
                         is_buffer
                             ? "assign new values in place (copy_()), name the buffer in DdpOptions.ignore, or keep "
                               "each rank's own buffers (BufferMode::kLocal)"
                             : "change the module first and then make the DistributedDataParallel, or make a new one");
}

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes, at::Device device) {
  std::ostringstream text;
  text << c10::toString(dtype) << sizes << " on " << device;
  return text.str();
}

}  // namespace

ModuleWatch::ModuleWatch(torch::nn::Module& module, std::vector<std::string> ignored, bool with_buffers)
    : ignored_(std::move(ignored)), module_(module.weak_from_this()) {
  ModelTensors model;  // here a tensor is listed under each of its names
  for (const auto& item : module.named_parameters()) model.parameters.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) model.buffers.emplace_back(item.key(), item.value());
  remember(model, with_buffers);
}

ModuleWatch::ModuleWatch(const ModelTensors& model, std::vector<std::string> ignored, bool with_buffers)
    : ignored_(std::move(ignored)) {
  remember(model, with_buffers);
}

void ModuleWatch::remember(const ModelTensors& model, bool with_buffers) {
  for (const bool is_buffer : {false, true}) {
    if (is_buffer && !with_buffers) continue;
    Kind kind{.is_buffer = is_buffer, .known = {}};
    for (const auto& [name, tensor] : is_buffer ? model.buffers : model.parameters)
      if (tensor.defined() && !is_ignored(name))
        kind.known.push_back({name, tensor, tensor.scalar_type(), tensor.sizes().vec(), tensor.device()});
    kinds_.push_back(std::move(kind));
  }
}

bool ModuleWatch::is_ignored(const std::string& name) const {
  return std::find(ignored_.begin(), ignored_.end(), name) != ignored_.end();
}

void ModuleWatch::check() const {
  const auto module = module_.lock();
  for (const Kind& kind : kinds_) {
    for (const Known& known : kind.known)
      if (known.tensor.scalar_type() != known.dtype || known.tensor.sizes() != known.sizes ||
          known.tensor.device() != known.device)
        fail(kind.is_buffer, known.name,
             "changed from " + describe(known.dtype, known.sizes, known.device) + " to " +
                 describe(known.tensor.scalar_type(), known.tensor.sizes(), known.tensor.device()) +
                 " (as to() and torch::load() do)");
    if (module) check_names(*module, kind);
  }
}

void ModuleWatch::check_names(torch::nn::Module& module, const Kind& kind) const {
  std::size_t i = 0;
  for (const auto& item : kind.is_buffer ? module.named_buffers() : module.named_parameters()) {
    if (!item.value().defined() || is_ignored(item.key())) continue;
    if (i == kind.known.size() || kind.known[i].name != item.key()) {
      const bool is_known = std::any_of(kind.known.begin(), kind.known.end(),
                                        [&](const Known& known) { return known.name == item.key(); });
      if (!is_known) fail(kind.is_buffer, item.key(), "added to the module");
      break;  // the known one was removed
    }
    if (!kind.known[i].tensor.is_same(item.value())) fail(kind.is_buffer, item.key(), "replaced by another tensor");
    ++i;
  }
  if (i < kind.known.size()) fail(kind.is_buffer, kind.known[i].name, "removed from the module");
}

}  // namespace lockstep::ddp
