// Which module was the first to put out an infinity or a NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace lockstep::amp {

/// Looks at what each operation of this thread computes, while it lives, and knows of which module's parameters or
/// buffers it was computed.
///
///   const FiniteChecker finite(*net);
///   const auto loss = loss_of(net->forward(input));
///   finite.check(loss);
///
/// Around forward and loss; operations inside backward() are passed over. Modules have no hooks in C++: one without
/// parameters is told as an operation, with the module before it. For looking for a fault: one more pass over every
/// result, and on a device a wait for each. Nests, also for other modules. Made and destroyed on one thread; nothing is
/// looked at on others. The module outlives it.
class [[nodiscard]] FiniteChecker {
 public:
  explicit FiniteChecker(const torch::nn::Module& module);
  ~FiniteChecker();
  FiniteChecker(const FiniteChecker&) = delete;
  FiniteChecker& operator=(const FiniteChecker&) = delete;

  /// Throws Error (NON_FINITE) when something that a module has put out, was given or has as a parameter was not
  /// finite, or `result` is not: with the name of the first such module as in named_modules(), the operation, and the
  /// least and greatest of the values. Infinities that were gone before the next module, as of a mask before a softmax,
  /// are none. Waits for no other rank.
  void check(const at::Tensor& result) const;

  class Observer;

 private:
  std::unique_ptr<Observer> observer_;
};

}  // namespace lockstep::amp
