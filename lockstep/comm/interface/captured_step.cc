#include "lockstep/comm/interface/captured_step.h"

#include <ATen/record_function.h>

#include <atomic>
#include <mutex>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::comm::inline interface {
namespace {

std::atomic<bool> exists{false};
std::mutex one_at_a_time;  // held by the thread of the instance
thread_local CapturedStep* of_this_thread = nullptr;

}  // namespace

CapturedStep::CapturedStep(bool capturing) : capturing_(capturing) {
  if (of_this_thread) throw base::UsageError("GraphedStep: called in the body of another one");
  one_at_a_time.lock();
  of_this_thread = this;
  exists.store(true, std::memory_order_release);
}

CapturedStep::~CapturedStep() {
  exists.store(false, std::memory_order_release);
  of_this_thread = nullptr;
  one_at_a_time.unlock();
}

CapturedStep* CapturedStep::current() { return of_this_thread; }

void CapturedStep::add_host_work(std::function<void()> work) {
  if (capturing_) return host_work_.push_back(std::move(work));
  const at::DisableRecordFunctionGuard not_traced;  // the body's operations are compared with those of the capture
  work();
}

void check_collectives_allowed(std::string_view operation) {
  if (!exists.load(std::memory_order_acquire)) return;
  throw base::UsageError(std::string(operation) +
                         " called inside a step that is captured as a CUDA graph: ranks compare each call on the host, "
                         "and a graph replays only the GPU's work. Call " +
                         std::string(operation) + " before or after it");
}

}  // namespace lockstep::comm::inline interface
