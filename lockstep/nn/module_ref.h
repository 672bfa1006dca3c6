// The parameter type of functions that take a module. It depends on base only, so that every module may include it.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/base/error.h"

namespace torch::nn {
class Module;
}

namespace lockstep::nn {

/// torch::nn::Module and the classes derived from it.
template <typename T>
concept ModuleClass = std::convertible_to<std::remove_reference_t<T>*, const torch::nn::Module*>;
/// A handle of a module: a ModuleHolder (declared by TORCH_MODULE), a std::shared_ptr or a pointer.
template <typename T>
concept ModuleHandle = requires(std::remove_reference_t<T>& handle) {
  { *handle } -> std::convertible_to<const torch::nn::Module&>;
};

/// Returns the module that `module` is or refers to, with its static type. Throws UsageError for a handle without a
/// module.
template <typename T>
  requires ModuleClass<T> || ModuleHandle<T>
auto& module_of(T& module) {
  if constexpr (ModuleClass<T>) {
    return module;
  } else {
    if constexpr (requires { module.is_empty(); }) {
      if (module.is_empty()) throw base::UsageError("the module holder is empty; expected a module");
    } else if constexpr (requires { module == nullptr; }) {
      if (module == nullptr) throw base::UsageError("the module pointer is null; expected a module");
    }
    return *module;
  }
}

/// The class of the module that an argument of type T is or refers to.
template <typename T>
using ModuleOf = std::remove_reference_t<decltype(module_of(std::declval<std::remove_reference_t<T>&>()))>;

/// A reference to a module, constructed implicitly from a module or from a handle of one. It owns nothing. Its
/// constructor throws UsageError for a handle without a module.
class ModuleRef {
 public:
  template <typename T>
    requires std::convertible_to<ModuleOf<T>*, torch::nn::Module*> && (std::is_lvalue_reference_v<T> || !ModuleClass<T>)
  ModuleRef(T&& module) : module_(module_of(module)) {}  // NOLINT(google-explicit-constructor)

  torch::nn::Module& operator*() const { return module_; }
  torch::nn::Module* operator->() const { return &module_; }

 private:
  torch::nn::Module& module_;
};

/// Returns a pointer to the module that `module` is or refers to. It shares the ownership of a handle; for a module
/// passed by reference it owns nothing.
template <typename M>
std::shared_ptr<torch::nn::Module> shared_module(M& module) {
  auto& found = module_of(module);
  if constexpr (ModuleHandle<M> && requires { module.ptr(); })
    return module.ptr();
  else if constexpr (std::is_convertible_v<M&, std::shared_ptr<torch::nn::Module>>)
    return module;
  else
    return {std::shared_ptr<void>(), &found};  // owns nothing
}

/// The same for functions that do not change the module.
class ConstModuleRef {
 public:
  template <typename T>
    requires std::convertible_to<ModuleOf<T>*, const torch::nn::Module*>
  ConstModuleRef(T&& module) : module_(module_of(module)) {}  // NOLINT(google-explicit-constructor)

  const torch::nn::Module& operator*() const { return module_; }
  const torch::nn::Module* operator->() const { return &module_; }

 private:
  const torch::nn::Module& module_;
};

}  // namespace lockstep::nn
