#include "lockstep/checkpoint/optimizer_state.h"

#include <torch/nn/module.h>
#include <torch/optim.h>

#include <functional>
#include <memory>
#include <unordered_map>

#include "lockstep/amp/unscaling.h"
#include "lockstep/base/parse.h"

namespace lockstep::checkpoint {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using NameOf = std::function<std::string(const at::Tensor& parameter)>;

// The fields of each optimizer, named once: options() and state() call `field(name, reference)` for all of them.
// is_required(): whether the next step needs this tensor.
template <typename AdamOptions, typename AdamParamState>
struct AdamFamilyTraits {
  using Options = AdamOptions;
  using State = AdamParamState;
  static void options(Options& options, const auto& field) {
    field("lr", options.lr());
    field("betas.0", std::get<0>(options.betas()));
    field("betas.1", std::get<1>(options.betas()));
    field("eps", options.eps());
    field("weight_decay", options.weight_decay());
    field("amsgrad", options.amsgrad());
  }
  static void state(State& state, const auto& field) {
    field("step", state.step());
    field("exp_avg", state.exp_avg());
    field("exp_avg_sq", state.exp_avg_sq());
    field("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  static bool is_required(std::string_view name, const Options& options) {
    return name != "max_exp_avg_sq" || options.amsgrad();
  }
};
using AdamTraits = AdamFamilyTraits<torch::optim::AdamOptions, torch::optim::AdamParamState>;
using AdamWTraits = AdamFamilyTraits<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;
struct SgdTraits {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static void options(Options& options, const auto& field) {
    field("lr", options.lr());
    field("momentum", options.momentum());
    field("dampening", options.dampening());
    field("weight_decay", options.weight_decay());
    field("nesterov", options.nesterov());
  }
  static void state(State& state, const auto& field) { field("momentum_buffer", state.momentum_buffer()); }
  static bool is_required(std::string_view, const Options&) { return true; }
};
struct RmsPropTraits {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static void options(Options& options, const auto& field) {
    field("lr", options.lr());
    field("alpha", options.alpha());
    field("eps", options.eps());
    field("weight_decay", options.weight_decay());
    field("momentum", options.momentum());
    field("centered", options.centered());
  }
  static void state(State& state, const auto& field) {
    field("step", state.step());
    field("square_avg", state.square_avg());
    field("momentum_buffer", state.momentum_buffer());
    field("grad_avg", state.grad_avg());
  }
  static bool is_required(std::string_view name, const Options& options) {
    return name == "momentum_buffer" ? options.momentum() > 0 : name != "grad_avg" || options.centered();
  }
};
struct AdagradTraits {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static void options(Options& options, const auto& field) {
    field("lr", options.lr());
    field("lr_decay", options.lr_decay());
    field("weight_decay", options.weight_decay());
    field("initial_accumulator_value", options.initial_accumulator_value());
    field("eps", options.eps());
  }
  static void state(State& state, const auto& field) {
    field("step", state.step());
    field("sum", state.sum());
  }
  static bool is_required(std::string_view, const Options&) { return true; }
};

// Calls `action(Traits())` with the traits of the optimizer class that has these options.
template <typename... AllTraits, typename Action>
bool dispatch(const OptimizerOptions& options, const Action& action) {
  return ((dynamic_cast<const typename AllTraits::Options*>(&options) ? (action(AllTraits()), true) : false) || ...);
}
template <typename Action>
void with_traits(const OptimizerOptions& options, const Action& action) {
  if (!dispatch<AdamTraits, AdamWTraits, SgdTraits, RmsPropTraits, AdagradTraits>(options, action))
    throw base::UsageError(
        "optimizer state: unsupported optimizer class; expected torch's Adam, AdamW, SGD, RMSprop or Adagrad");
}

// Stores fields under PREFIX.NAME; skips undefined tensors.
struct FieldExporter {
  StateDict& state;
  const std::string prefix;

  template <typename T>
  void operator()(const char* name, const T& value) const {
    if constexpr (std::is_same_v<T, at::Tensor>)
      if (!value.defined()) return;
    state[prefix + name] = StateValue(value);
  }
};

// Loads fields from PREFIX.NAME and removes them from `from`.
struct FieldImporter {
  StateDict& from;
  const std::string prefix;
  // For the state of a parameter, not for options, which have no tensors: the parameter, and whether the next step
  // needs a tensor.
  const at::Tensor* like = nullptr;
  const std::function<bool(std::string_view name)> is_required = nullptr;

  void operator()(const char* name, at::Tensor& tensor) const {
    const std::string key = prefix + name;
    const auto found = from.find(key);
    if (found == from.end()) {
      if (is_required(name)) throw base::UsageError("the state has no value " + base::quoted(key, 120));
      return;
    }
    const at::Tensor& value = value_of<at::Tensor>(from, key);
    if (!value.defined() || value.sizes() != like->sizes() || value.is_floating_point() != like->is_floating_point() ||
        value.is_complex() != like->is_complex())
      throw base::UsageError("the state's tensor " + base::quoted(key, 120) +
                             " has another shape or kind of numbers (real, complex, integer) than its parameter");
    tensor = value.detach().to(like->options().dtype(value.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
    from.erase(found);
  }
  template <typename T>
  void operator()(const char* name, T& value) const {
    value = value_of<T>(from, prefix + name);
    from.erase(prefix + name);
  }
};

// Optimizers of lockstep::optim derive from torch's class, but keep their state elsewhere.
void check_is_torch_optimizer(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const amp::UnscalingOptimizer*>(&optimizer))
    throw base::UsageError("optimizer state: the optimizer is one of lockstep::optim; expected one of torch::optim",
                           "call its own state_dict() and load_state_dict()");
}

// `name_of` returns the prefix of a parameter's fields. A parameter without a single field has no state. The new
// options and states are applied after all of them are valid.
void load_state(torch::optim::Optimizer& optimizer, StateDict state, const NameOf& name_of) {
  check_is_torch_optimizer(optimizer);
  const torch::NoGradGuard no_grad;
  std::vector<std::unique_ptr<OptimizerOptions>> new_options;
  std::unordered_map<void*, std::unique_ptr<OptimizerParamState>> new_states;
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    auto& group = optimizer.param_groups()[i];
    with_traits(group.options(), [&](auto traits) {
      using Traits = decltype(traits);
      auto options =
          std::make_unique<typename Traits::Options>(static_cast<const typename Traits::Options&>(group.options()));
      Traits::options(*options, FieldImporter{state, "group." + std::to_string(i) + "."});
      for (const at::Tensor& parameter : group.params()) {
        const std::string prefix = name_of(parameter) + ".";
        const auto first = state.lower_bound(prefix);
        if (first == state.end() || !first->first.starts_with(prefix)) continue;
        auto parameter_state = std::make_unique<typename Traits::State>();
        const auto is_required = [&](std::string_view name) { return Traits::is_required(name, *options); };
        Traits::state(*parameter_state, FieldImporter{state, prefix, &parameter, is_required});
        new_states[parameter.unsafeGetTensorImpl()] = std::move(parameter_state);
      }
      new_options.push_back(std::move(options));
    });
  }
  if (!state.empty())
    throw base::UsageError("the state has the value " + base::quoted(state.begin()->first, 120) +
                           ", which the optimizer does not have");
  for (std::size_t i = 0; i < new_options.size(); ++i)
    optimizer.param_groups()[i].set_options(std::move(new_options[i]));
  optimizer.state().clear();
  for (auto& [key, new_state] : new_states) optimizer.state()[key] = std::move(new_state);
}

NamedParameters parameters_of(const torch::nn::Module& module) {
  NamedParameters parameters;
  for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

StateDict export_state(const torch::optim::Optimizer& optimizer, const NameOf& name_of) {
  check_is_torch_optimizer(optimizer);
  StateDict state;
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    with_traits(group.options(), [&](auto traits) {
      using Traits = decltype(traits);
      auto options = static_cast<const typename Traits::Options&>(group.options());
      Traits::options(options, FieldExporter{state, "group." + std::to_string(i) + "."});
      for (const at::Tensor& parameter : group.params()) {
        const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (found != optimizer.state().end())
          Traits::state(static_cast<typename Traits::State&>(*found->second),
                        FieldExporter{state, name_of(parameter) + "."});
      }
    });
  }
  return state;
}

NameOf name_lookup(const NamedParameters& parameters) {
  std::unordered_map<void*, std::string> names;
  for (const auto& [name, tensor] : parameters) names.emplace(tensor.unsafeGetTensorImpl(), name);
  return [names](const at::Tensor& parameter) {
    const auto found = names.find(parameter.unsafeGetTensorImpl());
    if (found == names.end()) throw base::UsageError("the optimizer has a parameter that the module does not have");
    return found->second;
  };
}

// Names such as "parameter.7", numbered in the order of all groups.
NameOf index_lookup(const torch::optim::Optimizer& optimizer) {
  std::unordered_map<void*, std::string> names;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      names.emplace(parameter.unsafeGetTensorImpl(), "parameter." + std::to_string(names.size()));
  return [names](const at::Tensor& parameter) { return names.at(parameter.unsafeGetTensorImpl()); };
}

// Returns the fields of one prefix in Python's form, where a step is a tensor and betas are a pair.
Dict python_fields(const StateDict& state, const std::string& prefix) {
  Dict fields;
  for (auto at = state.lower_bound(prefix); at != state.end() && at->first.starts_with(prefix); ++at) {
    const std::string name = at->first.substr(prefix.size());
    if (name == "step")
      fields.add(name, torch::tensor(static_cast<float>(std::get<std::int64_t>(at->second))));
    else if (name == "betas.0")
      fields.add("betas", Sequence{Sequence::Kind::kTuple,
                                   {std::get<double>(at->second), value_of<double>(state, prefix + "betas.1")}});
    else if (name != "betas.1")
      fields.add(name, std::visit([](const auto& value) { return Value(value); }, at->second));
  }
  return fields;
}

[[noreturn]] void throw_python_state_error(const std::string& what) {
  throw base::UsageError("the optimizer state from Python: " + what);
}

template <typename T>
const T& python_entry(const Value& tree, std::string_view name) {
  const Dict* const dict = tree.as<Dict>();
  const Value* const found = dict ? dict->find(name) : nullptr;
  if (!found || !found->as<T>())
    throw_python_state_error("\"" + std::string(name) + "\" is " + (found ? std::string(kind_of(*found)) : "missing") +
                             "; expected a result of state_dict()");
  return *found->as<T>();
}

void add_python_field(StateDict& state, const std::string& name, const Value& value) {
  if (const auto* const it = value.as<bool>()) state[name] = *it;
  if (const auto* const it = value.as<double>()) state[name] = *it;
  if (const auto* const it = value.as<at::Tensor>()) state[name] = *it;
  // An integer in Python stands for a float, except for steps.
  if (const auto* const it = value.as<std::int64_t>()) state[name] = static_cast<double>(*it);
}

std::int64_t python_step(double number) {
  if (!(number >= 0 && number <= 0x1p53))
    throw_python_state_error("step is " + std::to_string(number) + "; expected 0 to 2^53");
  return static_cast<std::int64_t>(number);
}

void add_python_state(StateDict& state, const std::string& prefix, const Dict& fields) {
  for (const auto& item : fields.items) {
    const auto* const name = item.key.as<std::string>();
    if (!name) throw_python_state_error("a key is " + std::string(kind_of(item.key)) + "; expected a string");
    const auto* const step = *name == "step" ? item.value.as<at::Tensor>() : nullptr;
    if (step && step->numel() == 1 && !step->is_complex())
      state[prefix + *name] = python_step(step->item<double>());
    else if (const auto* const number = item.value.as<std::int64_t>(); number && *name == "step")
      state[prefix + *name] = *number;
    else
      add_python_field(state, prefix + *name, item.value);
  }
}

// Adds the options that C++ has, which are the names in `known`.
void add_python_options(StateDict& state, const std::string& prefix, const Dict& group, const StateDict& known) {
  if (const Value* const maximize = group.find("maximize"); maximize && maximize->as<bool>() && *maximize->as<bool>())
    throw_python_state_error("maximize is True; expected False");
  for (const auto& item : group.items) {
    const auto* const name = item.key.as<std::string>();
    const auto* const pair = item.value.as<Sequence>();
    if (name && *name == "betas" && pair && pair->items.size() == 2) {
      for (std::size_t i = 0; i < 2; ++i)
        add_python_field(state, prefix + "betas." + std::to_string(i), pair->items[i]);
    } else if (name && known.contains(prefix + *name)) {
      add_python_field(state, prefix + *name, item.value);
    }
  }
}

}  // namespace

StateDict optimizer_state_dict(const torch::optim::Optimizer& optimizer, const NamedParameters& parameters) {
  return export_state(optimizer, name_lookup(parameters));
}
StateDict optimizer_state_dict(const torch::optim::Optimizer& optimizer, nn::ConstModuleRef module) {
  return optimizer_state_dict(optimizer, parameters_of(*module));
}

void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                               const StateDict& state) {
  load_state(optimizer, state, name_lookup(parameters));
}
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, nn::ConstModuleRef module, const StateDict& state) {
  load_optimizer_state_dict(optimizer, parameters_of(*module), state);
}

StateDict optimizer_options(const torch::optim::Optimizer& optimizer) {
  StateDict state;
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const OptimizerOptions& group = optimizer.param_groups()[i].options();
    const std::string prefix = "group." + std::to_string(i) + ".";
    const bool known =
        dispatch<AdamTraits, AdamWTraits, SgdTraits, RmsPropTraits, AdagradTraits>(group, [&](auto traits) {
          using Traits = decltype(traits);
          auto options = static_cast<const typename Traits::Options&>(group);
          Traits::options(options, FieldExporter{state, prefix});
        });
    if (!known) state[prefix + "lr"] = group.get_lr();
  }
  return state;
}

Value python_optimizer_state(const torch::optim::Optimizer& optimizer) {
  const StateDict all = export_state(optimizer, index_lookup(optimizer));
  Dict states;
  Sequence groups;
  std::int64_t number = 0;
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    Dict group = python_fields(all, "group." + std::to_string(i) + ".");
    Sequence numbers;
    for (std::size_t j = 0; j < optimizer.param_groups()[i].params().size(); ++j, ++number) {
      numbers.items.emplace_back(number);
      Dict fields = python_fields(all, "parameter." + std::to_string(number) + ".");
      if (!fields.items.empty()) states.add(number, std::move(fields));
    }
    group.add("params", std::move(numbers));
    groups.items.emplace_back(std::move(group));
  }
  Dict tree;
  tree.add("state", std::move(states));
  tree.add("param_groups", std::move(groups));
  return tree;
}

void load_python_optimizer_state(torch::optim::Optimizer& optimizer, const Value& tree) {
  const auto& groups = python_entry<Sequence>(tree, "param_groups").items;
  if (groups.size() != optimizer.param_groups().size())
    throw_python_state_error("it has " + std::to_string(groups.size()) + " parameter groups; the optimizer has " +
                             std::to_string(optimizer.param_groups().size()));
  const StateDict known = export_state(optimizer, index_lookup(optimizer));
  StateDict state;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto num_given = python_entry<Sequence>(groups[i], "params").items.size(),
               num_expected = optimizer.param_groups()[i].params().size();
    if (num_given != num_expected)
      throw_python_state_error("group " + std::to_string(i) + " has " + std::to_string(num_given) +
                               " parameters; the optimizer's has " + std::to_string(num_expected));
    add_python_options(state, "group." + std::to_string(i) + ".", *groups[i].as<Dict>(), known);
  }
  for (const auto& item : python_entry<Dict>(tree, "state").items) {
    const auto* const number = item.key.as<std::int64_t>();
    const auto* const fields = item.value.as<Dict>();
    if (!number || !fields)
      throw_python_state_error("the state of a parameter is " + std::string(kind_of(item.value)) +
                               " under a key that is " + std::string(kind_of(item.key)) +
                               "; expected a dictionary under an integer");
    add_python_state(state, "parameter." + std::to_string(*number) + ".", *fields);
  }
  load_state(optimizer, std::move(state), index_lookup(optimizer));
}

}  // namespace lockstep::checkpoint
