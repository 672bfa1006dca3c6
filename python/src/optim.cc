// The optimizers of lockstep::optim.
#include <pybind11/stl.h>

#include <functional>
#include <memory>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/group_options.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/lars.h"
#include "lockstep/optim/sgd.h"
#include "python/src/bindings.h"

namespace lockstep::python {
namespace {

/// Reads values by their name from a dictionary; a name that is not there keeps its value.
class Reader {
 public:
  explicit Reader(const py::dict& values) : values_(values) {}
  void operator()(const char* name, double& value) const {
    if (values_.contains(name)) value = py::float_(values_[name]).cast<double>();
  }
  void operator()(const char* name, bool& value) const {
    if (values_.contains(name)) value = py::bool_(values_[name]).cast<bool>();
  }
  void operator()(const char* name, std::array<double, 2>& value) const {
    if (values_.contains(name)) value = values_[name].cast<std::array<double, 2>>();
  }

 private:
  const py::dict& values_;
};

template <typename Options>
Options read_options(const py::dict& values) {
  Options options;
  const Reader read(values);
  visit_options(options, read);
  if constexpr (requires { options.betas; }) read("betas", options.betas);  // LAMB visits each of them
  return options;
}

/// An optimizer of any class. Parameter groups have the numbers of Python's. With `first_listed` 1, the first holds the
/// parameters that no other lists.
class AnyOptimizer {
 public:
  template <typename Optimizer, typename Options, typename TorchOptions>
  static Holder<AnyOptimizer> make(const ddp::DistributedDataParallel& model,
                                   const std::vector<std::vector<at::Tensor>>& groups,
                                   const std::vector<py::dict>& options, std::size_t first_listed, bool shard_state,
                                   bool foreach) {
    std::vector<typename Optimizer::Group> others;
    for (std::size_t i = first_listed; i < groups.size(); ++i)
      others.push_back({groups[i], read_options<Options>(options.at(i))});
    const auto defaults = read_options<Options>(options.at(0));
    Holder<AnyOptimizer> any(new AnyOptimizer);
    any->write_ = [](torch::optim::OptimizerOptions& to, const py::dict& from) {
      copy_options(read_options<Options>(from), static_cast<TorchOptions&>(to));
    };
    const py::gil_scoped_release release;
    auto made = std::make_unique<Optimizer>(model, defaults, others,
                                            optim::FusedOptions{.shard_state = shard_state, .foreach = foreach});
    any->fused_ = made.get();
    any->torch_ = std::move(made);
    return any;
  }
  void set_options(std::size_t group, const py::dict& options) const {
    write_(torch_->param_groups().at(group).options(), options);
  }
  void step() const { torch_->step(); }
  at::Tensor clip_grad_norm(double max_norm) const { return optim::clip_grad_norm(*torch_, max_norm); }
  void clip_grad_value(double max) const { optim::clip_grad_value(*torch_, max); }
  optim::FusedOptimizer& fused() const { return *fused_; }

 private:
  std::unique_ptr<torch::optim::Optimizer> torch_;
  optim::FusedOptimizer* fused_ = nullptr;
  void (*write_)(torch::optim::OptimizerOptions&, const py::dict&) = nullptr;
};

std::map<std::string, at::Tensor> state_dict(const AnyOptimizer& optimizer) {
  const checkpoint::StateDict state = optimizer.fused().state_dict();
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, value] : state) tensors[name] = checkpoint::value_of<at::Tensor>(state, name);
  return tensors;
}

void load_state_dict(const AnyOptimizer& optimizer, const std::map<std::string, at::Tensor>& tensors) {
  checkpoint::StateDict state;
  for (const auto& [name, tensor] : tensors) state[name] = tensor;
  optimizer.fused().load_state_dict(state);
}

}  // namespace

void bind_optimizers(py::module_& module) {
  py::class_<AnyOptimizer, Holder<AnyOptimizer>>(module, "Optimizer")
      .def("set_options", &AnyOptimizer::set_options)
      .def("step", &AnyOptimizer::step, WithoutGil())
      .def(
          "skip_step", [](AnyOptimizer& self) { static_cast<amp::UnscalingOptimizer&>(self.fused()).skip_step(); },
          WithoutGil())
      .def("clip_grad_norm", &AnyOptimizer::clip_grad_norm, WithoutGil())
      .def("clip_grad_value", &AnyOptimizer::clip_grad_value, WithoutGil())
      .def(
          "average_gradients", [](AnyOptimizer& self) { self.fused().average_gradients(); }, WithoutGil())
      .def(
          "update_in_backward", [](AnyOptimizer& self, bool on) { self.fused().update_in_backward(on); }, WithoutGil())
      .def("shares_parameters", [](AnyOptimizer& self) { return self.fused().shares_parameters(); })
      .def("change_parameters",
           [](AnyOptimizer& self, const py::function& change) {
             const py::gil_scoped_release release;
             self.fused().change_parameters([&] {
               const py::gil_scoped_acquire gil;
               change();
             });
           })
      .def("state_dict", state_dict, WithoutGil())
      .def("load_state_dict", load_state_dict, WithoutGil());
  module.def("make_Adam", &AnyOptimizer::make<optim::Adam, optim::AdamOptions, torch::optim::AdamOptions>);
  module.def("make_AdamW", &AnyOptimizer::make<optim::AdamW, optim::AdamWOptions, torch::optim::AdamWOptions>);
  module.def("make_SGD", &AnyOptimizer::make<optim::SGD, optim::SGDOptions, torch::optim::SGDOptions>);
  module.def("make_Adagrad", &AnyOptimizer::make<optim::Adagrad, optim::AdagradOptions, torch::optim::AdagradOptions>);
  module.def("make_LAMB",
             &AnyOptimizer::make<optim::LAMB, optim::LAMBOptions, optim::GroupOptions<optim::LAMBOptions>>);
  module.def("make_LARS",
             &AnyOptimizer::make<optim::LARS, optim::LARSOptions, optim::GroupOptions<optim::LARSOptions>>);
}

}  // namespace lockstep::python
