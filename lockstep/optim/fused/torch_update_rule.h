// A rule whose options and state are those of an optimizer of torch.
#pragma once

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/fingerprint.h"
#include "lockstep/base/option_check.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::optim {

/// Parameters and what is wanted for them instead of the optimizer's options.
using Wanted = std::pair<std::vector<at::Tensor>, std::unique_ptr<torch::optim::OptimizerOptions>>;

/// torch's groups of all parameters of `source`: first those that no group names, which get the defaults. Throws
/// UsageError for one that is not of the source, or is in two groups.
std::vector<torch::optim::OptimizerParamGroup> make_groups(const ddp::GradientSource& source,
                                                           std::vector<Wanted> wanted);

/// `Scalars` is what the loops want to know of a part; read() makes it of torch's `Options` when the part has had
/// `steps` updates before.
template <typename Options, typename State, typename Scalars>
class TorchRule : public Rule {
 public:
  TorchRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source, std::vector<std::string> state_names)
      : optimizer_(optimizer), state_names_(std::move(state_names)) {
    for (const auto& parameter : source.parameters()) {
      places_[parameter.tensor.unsafeGetTensorImpl()] = keys_.size();
      keys_.push_back(parameter.tensor.unsafeGetTensorImpl());
    }
    scalars_.resize(keys_.size());
    alike_.resize(keys_.size());
  }

  const std::vector<std::string>& state_names() const override { return state_names_; }

  std::uint64_t prepare() override {
    numbers_.clear();
    std::size_t place = 0, alike = 0;
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      // Neighbours that have had equally many updates, as nearly all have, get the same: it is read once.
      std::int64_t read_for = -1;
      Scalars read_last{};
      for (const at::Tensor& tensor : group.params()) {
        const std::size_t part = part_of(tensor, place++);
        if (const std::int64_t had = steps(part); had != read_for) {
          ++alike;
          numbers_.push_back(static_cast<double>(place));
          read_last = read(options, read_for = had, numbers_);
        }
        scalars_[part] = read_last;
        alike_[part] = alike;
      }
    }
    return fingerprint(numbers_);
  }

  void update(std::size_t part, const Run& run) const override { optim::update(run, scalars_[part]); }
  void update(std::size_t part, const TensorRun& run) const override { optim::update(run, scalars_[part]); }
  std::size_t alike(std::size_t part) const override { return alike_[part]; }
  bool can_skip() const override {
    return std::all_of(scalars_.begin(), scalars_.end(), [this](const Scalars& one) { return skips(one); });
  }
  void updated(std::size_t part, const std::vector<at::Tensor>& states) override {
    if (state_names_.empty()) return;  // nothing to keep
    if (State* state = find(part))
      store(*state, count(*state) + 1, states);
    else
      set_states(part, 1, states);
  }

  std::int64_t steps(std::size_t part) const override {
    if (state_names_.empty()) return 0;
    const State* state = find(part);
    return state ? count(*state) : 0;
  }
  std::vector<at::Tensor> states(std::size_t part) const override {
    const State* state = find(part);
    return state ? list(*state) : std::vector<at::Tensor>(state_names_.size());
  }
  void set_states(std::size_t part, std::int64_t steps, const std::vector<at::Tensor>& states) override {
    if (steps == 0) {
      optimizer_.state().erase(keys_[part]);
      return;
    }
    auto& place = optimizer_.state()[keys_[part]];
    if (!place) place = std::make_unique<State>();
    store(static_cast<State&>(*place), steps, states);
  }

 protected:
  /// Appends what must be equal on all ranks to `numbers`. Throws UsageError when it needs state that the optimizer was
  /// made without.
  virtual Scalars read(const Options& options, std::int64_t steps, std::vector<double>& numbers) const = 0;
  virtual std::int64_t count(const State& state) const = 0;
  virtual std::vector<at::Tensor> list(const State& state) const = 0;
  virtual void store(State& state, std::int64_t steps, const std::vector<at::Tensor>& states) const = 0;
  virtual bool skips(const Scalars&) const { return false; }

 protected:
  Scalars& scalars(std::size_t part) { return scalars_[part]; }
  const Scalars& scalars(std::size_t part) const { return scalars_[part]; }

 private:
  State* find(std::size_t part) const {
    const auto& all = optimizer_.state();
    const auto found = all.find(keys_[part]);
    return found == all.end() ? nullptr : static_cast<State*>(found->second.get());
  }
  /// Of the parameter at `place` of all groups' together; the last answer is asked first.
  std::size_t part_of(const at::Tensor& tensor, std::size_t place) {
    if (place >= last_parts_.size()) last_parts_.resize(place + 1);
    std::size_t& part = last_parts_[place];
    if (keys_[part] == tensor.unsafeGetTensorImpl()) return part;
    const auto found = places_.find(tensor.unsafeGetTensorImpl());
    if (found == places_.end())
      throw base::UsageError(
          "lockstep::optim: a group of parameters has one that is not of the optimizer's DistributedDataParallel");
    return part = found->second;
  }

  torch::optim::Optimizer& optimizer_;
  const std::vector<std::string> state_names_;
  std::vector<void*> keys_;  // of torch's state, by part
  std::unordered_map<const void*, std::size_t> places_;
  std::vector<std::size_t> last_parts_;  // of part_of()
  std::vector<Scalars> scalars_;
  std::vector<std::size_t> alike_;
  std::vector<double> numbers_;  // of prepare()
};

}  // namespace lockstep::optim
