#include "lockstep/comm/channel/forbid_collectives.h"

#include <atomic>
#include <mutex>

#include "lockstep/base/error.h"

namespace lockstep::comm {
namespace {

std::atomic<bool> any{false};
std::mutex mutex;  // guards text
std::string text;

}  // namespace

NoHostPart::NoHostPart(std::string what) {
  const std::lock_guard lock(mutex);
  text = std::move(what);
  any.store(true, std::memory_order_release);
}

NoHostPart::~NoHostPart() { any.store(false, std::memory_order_release); }

void expect_host_part(std::string_view operation) {
  if (!any.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex);
  throw base::UsageError(std::string(operation) + " inside " + text +
                         ": ranks agree on each call on the host, which a graph leaves out; allowed is " +
                         std::string(operation) + " before or after it");
}

}  // namespace lockstep::comm
