// Callbacks at the beginning and the end of every backward(), on the thread that called it.
#pragma once

#include <string>

namespace lockstep::ddp {

/// Receives callbacks for every backward() of the process that accumulates gradients (torch::autograd::grad does not),
/// on the thread that called backward(). on_backward_begin() and on_backward_end() refer to the outermost backward(); a
/// re-entrant backward() inside it, as in gradient checkpointing, calls on_nested_backward().
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  virtual void on_backward_begin() = 0;
  virtual void on_nested_backward() = 0;
  /// An exception thrown here propagates out of backward().
  virtual void on_backward_end() = 0;
  /// backward() is about to exit with an exception whose text is `why`.
  virtual void on_backward_error(const std::string& why) noexcept = 0;
};

/// Registers `listener`. autograd has no such hook, so the first call installs an engine that forwards everything to
/// the default engine (torch::autograd::set_default_engine_stub, as torch's Python bindings do). Listeners are called
/// in the order of registration, and only on threads that call backward(). May be called from any thread. The caller
/// keeps ownership and must remove the listener before destroying it.
void add_backward_listener(BackwardListener* listener);
void remove_backward_listener(BackwardListener* listener);

}  // namespace lockstep::ddp
