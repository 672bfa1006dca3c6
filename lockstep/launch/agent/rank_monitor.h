// Monitors ranks through the pages of shared memory that the agent creates for them, counts out-of-memory kills, and
// replies to `lockstep status`.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/job_key.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/activity.h"
#include "lockstep/launch/protocol/status_messages.h"

namespace lockstep::launcher::agent {

/// Returns the number in the line "oom_kill N" of `text`, the content of memory.events, memory.oom_control or
/// /proc/vmstat; 0 if there is none. Pure.
std::int64_t parse_oom_kills(std::string_view text);

/// Returns the number of out-of-memory kills so far in this process's cgroup, or on the machine if the cgroup has no
/// counter.
std::int64_t count_oom_kills();

/// Owns the page of one rank. Not thread-safe. The rank writes the page concurrently, and its values are untrusted.
class RankMonitor {
 public:
  /// Creates the page and stores in it `key`, which the rank reads from there. Throws SystemError.
  RankMonitor(int rank, const job::JobKey& key);

  /// Returns the descriptor of the page, which the caller passes to the rank. This object keeps ownership.
  int descriptor() const { return memory_.fd().get(); }

  /// Samples the page and returns the health of the rank. Call it about once per second. `pid` is the process that was
  /// started. A rank that has not joined its world, or has left it, makes progress while it works, and has no heartbeat
  /// while its process is stopped (T). A rank that a debugger has stopped (t), or whose core is being dumped, counts as
  /// healthy.
  job::health::RankHealth health(pid_t pid, job::health::StallTimer::Clock::time_point now);

  /// Returns whether add_activity() is needed to judge the rank: its main thread waits for no other rank, and it has
  /// reported no progress for some seconds. Call it after health().
  bool needs_activity() const;
  /// Sets in the page whether the rank works, and updates `health`. Call it once per second while it is needed.
  void add_activity(pid_t pid, const process::HostActivity& activity, job::health::StallTimer::Clock::time_point now,
                    job::health::RankHealth& health);

  /// Returns the newest checkpoint that the rank has reported as durable, also after its exit; 0 if there is none.
  std::int64_t durable_checkpoint() const { return page().is_published() ? page().durable_checkpoint.load() : 0; }
  /// Returns RankPage::tcp_ports, also after the rank's exit.
  std::array<std::int64_t, 64> tcp_ports() const;
  /// Returns the snapshot of the rank's page, also after its exit; nullopt if the rank has not published it. It waits
  /// also if health() has found that without the page.
  std::optional<base::telemetry::RankSnapshot> snapshot() const;

  /// Returns what `lockstep status` shows of the rank: its CPU share is that since the last but one call of health(),
  /// which is 1 to 2 s ago. `pid` is the process that was started; -1 after its exit.
  protocol::RankStatus status(pid_t pid) const;

  /// Returns the pid in the page, or `fallback` if the page has none.
  pid_t pid(pid_t fallback) const {
    const pid_t page_pid = page().pid;
    return page_pid > 0 ? page_pid : fallback;
  }
  /// Returns whether the rank is between init() and the end of its world, in which time its waiting operations read the
  /// store.
  bool is_in_world() const { return page().is_published() && page().has_left == 0; }

  /// Publishes whether the rank waits because its output is not read. It then counts as making progress.
  void set_output_blocked(bool blocked) { page().output_blocked.store(blocked); }

  /// Sets the stop request in the page, so that waiting operations of the rank check the store for a failure at once.
  void notify_failure() { page().stop_requested.store(1); }

 private:
  base::telemetry::RankPage& page() const { return base::telemetry::rank_page_in(memory_); }

  const int rank_;
  base::SharedMemory memory_;
  job::health::StallTimer beat_timer_, progress_timer_, report_timer_, activity_timer_;
  job::health::RankHealth health_;  // the last result of health()
  process::Usage usage_;            // at usage_time_
  job::health::StallTimer::Clock::time_point usage_time_{};
  bool needed_activity_ = false;  // at usage_time_, and since then
  std::uint64_t num_active_samples_ = 0, num_work_samples_ = 0;
  process::ProcessSample last_sample_, earlier_sample_;  // of the last two calls of health()
  std::uint64_t polls_ = 0;
};

/// Listens for `lockstep status`. Not thread-safe. Nothing blocks.
class StatusResponder {
 public:
  /// If the system refuses a socket, fd() returns -1: the job runs nevertheless, and `lockstep status` lists only the
  /// ranks that it finds by itself.
  explicit StatusResponder(plan::JobLabel label);

  /// Returns the descriptor to poll for reading. Then call reply().
  int fd() const { return listener_ ? listener_->fd() : -1; }
  /// Replies to all processes of this user that have connected.
  void reply(std::vector<protocol::RankStatus> ranks) const;

 private:
  const plan::JobLabel label_;
  const std::string host_;
  std::optional<base::net::AbstractListener> listener_;
};

}  // namespace lockstep::launcher::agent
