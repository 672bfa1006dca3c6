// Knowing when backward() begins and ends, on the thread that called it.
#pragma once

#include <string>

namespace lockstep::ddp {

/// Told about every backward() of the process that accumulates gradients (torch::autograd::grad does not). Calls come
/// on the thread that called backward(). `begun` and `ended` speak of the outermost one; a re-entrant backward inside
/// it, as gradient checkpointing makes, is `nested`.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  virtual void on_backward_begin() = 0;
  virtual void on_nested_backward() = 0;
  /// May throw: the error leaves backward().
  virtual void on_backward_end() = 0;
  /// backward() leaves with an exception whose text is `why`.
  virtual void on_backward_error(const std::string& why) noexcept = 0;
};

/// From here on `listener` is told. autograd has no such hook, so the first call puts an engine in front of the default
/// one that passes everything on to it (torch::autograd::set_default_engine_stub, as torch's Python bindings do).
/// Listeners are told in the order of listen(). Any thread; a listener is called only by threads that call backward().
void add_backward_listener(BackwardListener* listener);
void remove_backward_listener(BackwardListener* listener);

}  // namespace lockstep::ddp
