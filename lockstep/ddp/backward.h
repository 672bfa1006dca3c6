// Backward: one call of backward(), from its beginning to its end, and the models whose parameters it reaches.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::ddp {

/// A model that takes part in a backward() if that reaches one of its parameters.
class BackwardParticipant {
 public:
  virtual ~BackwardParticipant() = default;
  /// A backward() begins on the thread that made this object or that last ran a backward() with it. An exception
  /// thrown here propagates out of backward(), before it has computed anything.
  virtual void check_before_backward() = 0;
  /// A backward() that this object has joined has computed all gradients. Called on the thread that called backward().
  /// An exception thrown here propagates out of backward().
  virtual void on_backward_end() = 0;
  /// A backward() is about to exit with an exception whose text is `why`. This object has joined it, or its parameters
  /// are among `leaves`, the nodes of the graph that accumulate gradients.
  virtual void on_backward_error(const std::string& why,
                                 const std::vector<torch::autograd::Node*>& leaves) noexcept = 0;
};

/// One outermost backward() of one thread. A backward() inside it, as in gradient checkpointing, belongs to it. There
/// can be several at a time, on different threads; each concerns only the models that join it.
class Backward {
 public:
  /// In a hook of autograd, on any of its threads: the backward() that has called the hook. Null outside backward(),
  /// and in a backward() of an engine that is not torch's default engine.
  static Backward* current() noexcept;

  /// The thread that called backward().
  std::thread::id thread() const { return thread_; }
  /// True once it has called backward() again, inside.
  bool is_nested() const { return is_nested_.load(std::memory_order_relaxed); }
  /// In a hook that is about to throw the exception that is being handled. Does nothing outside backward().
  static void record_error() noexcept;
  /// From now on `participant` is told how this backward() ends. May be called from any thread, once.
  void join(BackwardParticipant& participant);

 private:
  friend class BackwardEngine;
  friend void watch_backward(const torch::autograd::edge_list& roots, const std::function<void()>& run);
  /// After autograd is done. Each join() happens before the return.
  const std::vector<BackwardParticipant*>& joined() const;
  std::exception_ptr error() const;

  const std::thread::id thread_ = std::this_thread::get_id();
  std::atomic<bool> is_nested_{false};
  mutable std::mutex mutex_;  // guards the members below
  std::vector<BackwardParticipant*> joined_;
  std::exception_ptr error_;  // the first that a hook has thrown
};

/// Each hook of autograd has one as its first object: autograd's queues order a hook after the beginning of backward()
/// and before its end, which the thread sanitizer does not see.
class HookScope {
 public:
  HookScope() noexcept;
  ~HookScope();
};

/// Lets `leaf`, the node that accumulates the gradient of `parameter`, work on this thread's current stream from now
/// on. Autograd gives a node the stream on which it was created. For a node that lives longer than one graph, that
/// would be the stream on which its owner was made, which cannot wait for a stream that is being captured as a CUDA
/// graph.
void accumulate_on_current_stream(torch::autograd::Node& leaf, const at::Tensor& parameter);

/// Registers `participant`, on the thread that will call backward(). autograd has no hook for the end of a backward(),
/// so the first call installs an engine that forwards everything to the default engine
/// (torch::autograd::set_default_engine_stub, as torch's Python bindings do). May be called from any thread. The caller
/// keeps ownership and must remove the participant before destroying it, and not during a backward() that it has
/// joined.
void add_backward_participant(BackwardParticipant* participant);

/// Calls `run`, which runs a backward() that accumulates gradients from `roots` on this thread, and tells participants
/// of its beginning and end. For engines that do not go through the default one, such as that of torch's Python
/// bindings. Rethrows what `run` throws; if a participant has thrown before that, in a hook, its exception.
void watch_backward(const torch::autograd::edge_list& roots, const std::function<void()>& run);
void remove_backward_participant(BackwardParticipant* participant);
/// Whether this thread has registered `participant`, or has last run a backward() that it has joined.
bool belongs_to_this_thread(const BackwardParticipant* participant);

}  // namespace lockstep::ddp
