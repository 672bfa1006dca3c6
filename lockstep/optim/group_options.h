// Optimizers that torch does not have: options of their parameter groups, saving and loading.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <type_traits>
#include <vector>

namespace lockstep::optim {

/// Adapts a plain struct of options, `Values`, to torch's OptimizerOptions. `Values` has a member `lr`. A function
/// visit_options(values, visit) in its namespace calls visit(name, value) for each double and bool.
template <typename Values>
class GroupOptions final : public torch::optim::OptimizerCloneableOptions<GroupOptions<Values>> {
 public:
  explicit GroupOptions(const Values& start) : values(start) {}
  explicit GroupOptions(double lr) { values.lr = lr; }  // torch calls this before it reads options from an archive

  double get_lr() const override { return values.lr; }
  void set_lr(const double lr) override { values.lr = lr; }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    visit_options(values, [&](const char* name, const auto& value) { archive.write(name, c10::IValue(value)); });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    visit_options(values, [&](const char* name, auto& value) {
      c10::IValue read;
      archive.read(name, read);
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>)
        value = read.toBool();
      else
        value = read.toDouble();
    });
  }

  Values values;
};

template <typename Values>
void copy_options(const Values& from, GroupOptions<Values>& to) {
  to.values = from;
}

/// An optimizer with GroupOptions<Values>, and with the state of an optimizer of torch that has the same tensors.
template <typename Values, typename State>
class CustomOptimizer : public torch::optim::Optimizer {
 public:
  CustomOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, const GroupOptions<Values>& defaults)
      : Optimizer(groups, std::make_unique<GroupOptions<Values>>(defaults)) {}

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, GroupOptions<Values>>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, GroupOptions<Values>>(archive, *this);
  }
};

}  // namespace lockstep::optim
