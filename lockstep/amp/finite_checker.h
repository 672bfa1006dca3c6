// Finds the first module whose output has an infinity or a NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "lockstep/nn/module_ref.h"

namespace lockstep::amp {

/// While it exists, checks the results of all operations of this thread, and attributes each operation to the module
/// whose parameters or buffers it uses.
///
///   const FiniteChecker finite(net);
///   const auto loss = loss_of(net->forward(input));
///   finite.check(loss);
///
/// Put it around the forward pass and the loss; operations inside backward() are ignored. Modules have no forward hooks
/// in C++, so a module without parameters is reported as an operation together with the preceding module. Meant for
/// debugging: it makes one more pass over every result, and waits for each result on a device. Checkers may be nested,
/// including checkers of different modules. A checker must be created and destroyed on the same thread; other threads
/// are not checked. The module must outlive it.
class [[nodiscard]] FiniteChecker {
 public:
  explicit FiniteChecker(nn::ConstModuleRef module);
  ~FiniteChecker();
  FiniteChecker(const FiniteChecker&) = delete;
  FiniteChecker& operator=(const FiniteChecker&) = delete;

  /// Throws Error (NON_FINITE) if an input, an output, a parameter or a buffer of a module was not finite, or if
  /// `result` is not. The error names the first such module as in named_modules(), the operation, and the minimum and
  /// maximum of the values. Infinities that disappear before the next module, such as those of a mask before a softmax,
  /// are not reported. Does not wait for other ranks.
  void check(const at::Tensor& result) const;

  class Observer;

 private:
  std::unique_ptr<Observer> observer_;
};

}  // namespace lockstep::amp
