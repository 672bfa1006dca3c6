#include "lockstep/comm/channel/forbid_collectives.h"

#include <atomic>
#include <mutex>

#include "lockstep/base/error.h"

namespace lockstep::comm::channel {
namespace {

std::atomic<bool> is_forbidden{false};
std::mutex mutex;  // guards text
std::string text;

}  // namespace

ForbidCollectives::ForbidCollectives(std::string what) {
  const std::lock_guard lock(mutex);
  text = std::move(what);
  is_forbidden.store(true, std::memory_order_release);
}

ForbidCollectives::~ForbidCollectives() { is_forbidden.store(false, std::memory_order_release); }

void check_collectives_allowed(std::string_view operation) {
  if (!is_forbidden.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex);
  throw base::UsageError(std::string(operation) + " called inside " + text +
                         ": ranks compare each call on the host, and a graph replays only the GPU's work. Call " +
                         std::string(operation) + " before or after it");
}

}  // namespace lockstep::comm::channel
