#include "python/src/monitored_barrier.h"

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/channel/interrupt.h"

namespace lockstep::python {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStorePoll{100};

[[noreturn]] void throw_timeout(int rank, int peer, const std::string& text) {
  throw base::TimeoutError(base::Cause::kRankStuck, "monitored_barrier", rank, peer, text,
                           "look for the rank that does not call it: in a branch, in a longer loop, or ended");
}

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

void MonitoredBarrier::run(milliseconds timeout, bool wait_all_ranks) const {
  if (rank == 0) return wait_as_rank_zero(timeout, wait_all_ranks);
  store.set(key_of(rank), "1");
  wait_for_result(timeout);
}

/// Returns whether `name` has been set by the end of `timeout`. Ctrl-C ends the wait.
bool MonitoredBarrier::is_set(const std::string& name, milliseconds timeout) const {
  const auto limit = base::Deadline::in(timeout);
  for (;;) {
    if (store.check({name})) return true;
    if (limit.expired()) return false;
    if (comm::channel::is_interrupted())
      throw base::CommError(base::Cause::kInterrupted, "monitored_barrier", rank, -1, "interrupted");
    try {
      store.wait({name}, std::max(milliseconds(1), std::min(kStorePoll, limit.remaining())));
    } catch (const c10::Error&) {  // not in this time; a store that is gone throws in check()
    }
  }
}

void MonitoredBarrier::wait_as_rank_zero(milliseconds timeout, bool wait_all_ranks) const {
  const auto limit = base::Deadline::in(timeout);
  const std::string after = std::to_string(timeout.count()) + " ms";
  std::vector<int> absent;
  std::string failure;
  for (int peer = 1; peer < size && (absent.empty() || wait_all_ranks); ++peer) {
    if (limit.expired() && absent.empty()) {
      failure = "Rank 0 timed out in monitoredBarrier after " + after;
      absent.push_back(peer);
      break;
    }
    if (!is_set(key_of(peer), limit.remaining())) absent.push_back(peer);
  }
  if (!absent.empty() && failure.empty())
    failure = (absent.size() > 1 || wait_all_ranks ? "Ranks " : "Rank ") + join(absent) +
              " failed to pass monitoredBarrier in " + after;
  store.set(key_of(0), failure);
  if (!failure.empty()) throw_timeout(rank, absent.front(), failure);
}

void MonitoredBarrier::wait_for_result(milliseconds timeout) const {
  // Rank 0 may have come as late as this rank is early.
  std::string failure = "no answer in " + std::to_string(2 * timeout.count()) + " ms";
  if (is_set(key_of(0), 2 * timeout)) {
    const auto answer = store.get(key_of(0));
    failure.assign(answer.begin(), answer.end());
  }
  if (failure.empty()) return;
  throw_timeout(
      rank, 0,
      "Rank " + std::to_string(rank) +
          " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank " +
          "0: " + failure);
}

}  // namespace lockstep::python
