// CapturedStep: what a training step must leave to the host while a CUDA graph is made of it. A replayed graph repeats
// only the GPU's work.
#pragma once

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::comm::inline interface {

/// Exists while the body of a step runs, eagerly before a capture or in the capture itself. Starting an operation of
/// any group then throws a UsageError that names it, because ranks compare each operation on the host. This applies to
/// all threads, because autograd has threads of its own. The constructor blocks while another thread has an instance,
/// and throws UsageError if this thread has one.
class [[nodiscard]] CapturedStep {
 public:
  using HostWork = std::vector<std::function<void()>>;

  /// `capturing`: the body is not executed, but captured.
  explicit CapturedStep(bool capturing);
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  /// The instance that this thread has made, or null.
  static CapturedStep* current();

  /// Adds work of the host that belongs to every run of the step, such as counting it or writing a learning rate to the
  /// device. It is called at once in an eager run, and before every replay after a capture. What it starts on the
  /// device precedes the step.
  void add_host_work(std::function<void()> work);
  /// Returns what a capture has collected, in the order in which it was added.
  HostWork take_host_work() { return std::exchange(host_work_, {}); }

 private:
  const bool capturing_;
  HostWork host_work_;
};

/// Throws the UsageError if a CapturedStep exists. Called at the start of every operation.
void check_collectives_allowed(std::string_view operation);

}  // namespace lockstep::comm::inline interface
