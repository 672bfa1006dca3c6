#include "lockstep/comm/channel/captured_step.h"

#include <ATen/record_function.h>

#include <atomic>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::comm::channel {
namespace {

std::atomic<bool> exists{false};
thread_local CapturedStep* of_this_thread = nullptr;

}  // namespace

CapturedStep::CapturedStep(bool capturing) : capturing_(capturing) {
  if (exists.exchange(true))
    throw base::UsageError("two steps are made into CUDA graphs at the same time, on two threads or one in the other");
  of_this_thread = this;
}

CapturedStep::~CapturedStep() {
  of_this_thread = nullptr;
  exists.store(false);
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

}  // namespace lockstep::comm::channel
