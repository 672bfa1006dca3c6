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
  store.set(key_of(rank, number), "1", base::Deadline::in(timeout));
  wait_for_result(timeout);
}

/// Returns the value of `name` when it has one, nullopt at the end of `timeout`. Ctrl-C ends the wait.
std::optional<std::string> MonitoredBarrier::wait_for(const std::string& name, milliseconds timeout) const {
  const auto limit = base::Deadline::in(timeout);
  for (;;) {
    if (auto value = store.get(name, earlier(limit, base::Deadline::in(kStorePoll)))) return value;
    if (limit.expired()) return std::nullopt;
    if (comm::channel::is_interrupted())
      throw base::CommError(base::Cause::kInterrupted, "monitored_barrier", rank, -1, "interrupted");
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
    if (!wait_for(key_of(peer, number), limit.remaining())) absent.push_back(peer);
  }
  if (!absent.empty() && failure.empty())
    failure = (absent.size() > 1 || wait_all_ranks ? "Ranks " : "Rank ") + join(absent) +
              " failed to pass monitoredBarrier in " + after;
  store.set(key_of(0, number), failure, base::Deadline::in(timeout));
  if (!failure.empty()) throw_timeout(rank, absent.front(), failure);
  forget_last_call();
}

void MonitoredBarrier::forget_last_call() const {
  if (number == 1) return;
  for (int peer = 0; peer < size; ++peer)
    store.compare_set(key_of(peer, number - 1), peer == 0 ? "" : "1", "", base::Deadline::in(kStorePoll));
}

std::string MonitoredBarrier::key_of(int of_rank, std::int64_t call) const {
  return "monitored_barrier/" + std::to_string(call) + "/" + std::to_string(of_rank);
}

void MonitoredBarrier::wait_for_result(milliseconds timeout) const {
  // Rank 0 may have come as late as this rank is early.
  const std::string failure =
      wait_for(key_of(0, number), 2 * timeout).value_or("no answer in " + std::to_string(2 * timeout.count()) + " ms");
  if (failure.empty()) return;
  throw_timeout(
      rank, 0,
      "Rank " + std::to_string(rank) +
          " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank " +
          "0: " + failure);
}

}  // namespace lockstep::python
