// TorchUpdateRule: an UpdateRule whose options and state are those of an optimizer of torch.
#pragma once

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::optim::inline fused {

/// Parameters with options of their own.
using ParamGroupOptions = std::pair<std::vector<at::Tensor>, std::unique_ptr<torch::optim::OptimizerOptions>>;

/// Builds torch's parameter groups for all parameters of `source`. The first group holds the parameters that
/// `param_group_options` does not list; they get the optimizer's defaults. Throws UsageError for a parameter that does
/// not belong to `source` or is listed in two groups.
std::vector<torch::optim::OptimizerParamGroup> make_param_groups(const ddp::GradientSource& source,
                                                                 std::vector<ParamGroupOptions> param_group_options);
/// The same for FusedOptimizerOf::Group. `checked` returns torch's form of the options of a group.
template <typename Group, typename Checked>
std::vector<torch::optim::OptimizerParamGroup> make_param_groups(const ddp::GradientSource& source,
                                                                 const std::vector<Group>& groups,
                                                                 const Checked& checked) {
  std::vector<ParamGroupOptions> all;
  for (const Group& group : groups) {
    auto options = checked(group.options);
    all.emplace_back(group.parameters, std::make_unique<decltype(options)>(std::move(options)));
  }
  return make_param_groups(source, std::move(all));
}

/// Throws UsageError for the first option of the list of names and values that is below 0.
void check_not_negative(const std::string& optimizer, const std::vector<std::pair<std::string, double>>& options);
void check_betas(const std::string& optimizer, const std::array<double, 2>& betas);

template <typename TorchOptions, typename Options>
TorchOptions to_torch_options(const Options& options) {
  TorchOptions converted(options.lr);
  copy_options(options, converted);
  return converted;
}

/// `Scalars` holds the arguments of a kernel for one parameter; `Options` and `State` are torch's. `Derived` is the
/// class that derives from this one. It has the following functions, which are not virtual, because a pass calls them
/// for each parameter.
///
/// Returns the kernel's arguments for a parameter that has been updated `steps` times, and appends every value that
/// must be equal on all ranks to `numbers`: the learning rate first, and `steps` last. Throws UsageError if the options
/// need state that the optimizer was made without:
///     Scalars make_scalars(const Options& options, std::int64_t steps, std::vector<double>& numbers) const;
/// Returns the tensors of torch's state of one parameter, in the order of state_names(), which may name fewer:
///     static std::array<at::Tensor*, N> state_tensors(State& state);
/// UpdateRule::can_skip() for one parameter, unless it is always true:
///     bool can_skip_update(const Scalars& scalars) const;
template <typename Derived, typename Options, typename State, typename Scalars>
class TorchUpdateRule : public UpdateRule {
 public:
  using Kernel = void (*)(const kernels::KernelArgs&, const Scalars&);

  TorchUpdateRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source, Kernel update_kernel,
                  std::vector<std::string> state_names)
      : optimizer_(optimizer), kernel_(update_kernel), state_names_(std::move(state_names)) {
    for (const auto& parameter : source.parameters()) {
      index_by_parameter_[parameter.tensor.unsafeGetTensorImpl()] = keys_.size();
      keys_.push_back(parameter.tensor.unsafeGetTensorImpl());
    }
    scalars_.resize(keys_.size());
    batch_keys_.resize(keys_.size());
  }

  const std::vector<std::string>& state_names() const override { return state_names_; }

  std::uint64_t prepare() override {
    numbers_.clear();
    constants_.clear();
    std::size_t place = 0, batch_key = 0;
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      // Consecutive parameters with the same step count, which is the normal case, share one make_scalars() call.
      std::int64_t scalars_steps = -1;
      Scalars last_scalars{};
      for (const at::Tensor& tensor : group.params()) {
        const std::size_t index = index_of(tensor, place++);
        if (const std::int64_t num_updates = steps(index); num_updates != scalars_steps) {
          ++batch_key;
          numbers_.push_back(static_cast<double>(place));
          const std::size_t begin = numbers_.size();
          last_scalars = derived().make_scalars(options, scalars_steps = num_updates, numbers_);
          constants_.insert(constants_.end(), numbers_.begin() + begin + 1, numbers_.end() - 1);
        }
        scalars_[index] = last_scalars;
        batch_keys_[index] = batch_key;
      }
    }
    return fingerprint(numbers_);
  }

  Kernel kernel() const { return kernel_; }
  const Scalars& scalars(std::size_t index) const { return scalars_[index]; }
  void update(std::size_t index, const kernels::ForeachArgs& args) const override {
    optim::kernels::update(args, scalars_[index]);
  }
  std::size_t batch_key(std::size_t index) const override { return batch_keys_[index]; }
  double lr(std::size_t index) const override { return scalars_[index].lr; }
  std::uint64_t hash_of_constants() const override { return fingerprint(constants_); }
  bool can_skip() const override {
    return std::all_of(scalars_.begin(), scalars_.end(),
                       [this](const Scalars& scalars) { return derived().can_skip_update(scalars); });
  }
  void on_updated(std::size_t index, const std::vector<at::Tensor>& states) override {
    if (state_names_.empty()) return;  // there is no state
    if (State* state = find_state(index))
      write_state(*state, step_count(*state) + 1, states);
    else
      set_states(index, 1, states);
  }

  std::int64_t steps(std::size_t index) const override {
    if (state_names_.empty()) return 0;
    State* state = find_state(index);
    return state ? step_count(*state) : 0;
  }
  std::vector<at::Tensor> states(std::size_t index) const override {
    std::vector<at::Tensor> states(state_names_.size());
    if (State* state = find_state(index))
      for (std::size_t i = 0; i < states.size(); ++i) states[i] = *Derived::state_tensors(*state)[i];
    return states;
  }
  void set_states(std::size_t index, std::int64_t steps, const std::vector<at::Tensor>& states) override {
    if (steps == 0) {
      optimizer_.state().erase(keys_[index]);
      return;
    }
    auto& place = optimizer_.state()[keys_[index]];
    if (!place) place = std::make_unique<State>();
    write_state(static_cast<State&>(*place), steps, states);
  }

  static bool can_skip_update(const Scalars&) { return true; }

 protected:
  Scalars& scalars(std::size_t index) { return scalars_[index]; }

 private:
  static constexpr bool kCountsSteps = requires(State& state) { state.step(); };

  static std::int64_t step_count(State& state) {
    if constexpr (kCountsSteps)
      return state.step();
    else
      return Derived::state_tensors(state)[0]->defined() ? 1 : 0;
  }
  static void write_state(State& state, std::int64_t steps, const std::vector<at::Tensor>& states) {
    if constexpr (kCountsSteps) state.step(steps);
    const auto tensors = Derived::state_tensors(state);
    for (std::size_t i = 0; i < states.size(); ++i) *tensors[i] = states[i];
  }
  const Derived& derived() const { return static_cast<const Derived&>(*this); }
  State* find_state(std::size_t index) const {
    const auto& all = optimizer_.state();
    const auto found = all.find(keys_[index]);
    return found == all.end() ? nullptr : static_cast<State*>(found->second.get());
  }
  /// The index of the parameter at position `place` in the concatenation of all groups. Tries the previous result
  /// first.
  std::size_t index_of(const at::Tensor& tensor, std::size_t place) {
    if (place >= last_indices_.size()) last_indices_.resize(place + 1);
    std::size_t& index = last_indices_[place];
    if (keys_[index] == tensor.unsafeGetTensorImpl()) return index;
    const auto found = index_by_parameter_.find(tensor.unsafeGetTensorImpl());
    if (found == index_by_parameter_.end())
      throw base::UsageError(
          "lockstep::optim: a parameter group contains a parameter that does not belong to the optimizer's "
          "DistributedDataParallel");
    return index = found->second;
  }

  torch::optim::Optimizer& optimizer_;
  const Kernel kernel_;
  const std::vector<std::string> state_names_;
  std::vector<void*> keys_;  // keys of torch's state, by index
  std::unordered_map<const void*, std::size_t> index_by_parameter_;
  std::vector<std::size_t> last_indices_;  // cache of index_of(), by place
  std::vector<Scalars> scalars_;
  std::vector<std::size_t> batch_keys_;
  std::vector<double> numbers_;    // of the last prepare()
  std::vector<double> constants_;  // those of them that are neither learning rates nor step counts
};

}  // namespace lockstep::optim::inline fused
