#include "lockstep/launch/agent/rank_monitor.h"

#include <unistd.h>

#include <cstring>

#include "lockstep/launch/process/stack_dump.h"

namespace lockstep::launcher::agent {

RankMonitor::RankMonitor(int rank, const job::JobKey& key) : rank_(rank), memory_(base::telemetry::create_rank_page()) {
  base::telemetry::RankPage& page = base::telemetry::rank_page_in(memory_);
  page.agent_pid = ::getpid();
  std::memcpy(page.key.data(), key.bytes().data(), page.key.size());
}

bool RankMonitor::is_in_world() const {
  const base::telemetry::RankPage& page = base::telemetry::rank_page_in(memory_);
  return page.is_published() && page.has_left == 0;
}

std::int64_t RankMonitor::durable_checkpoint() const {
  const base::telemetry::RankPage& page = base::telemetry::rank_page_in(memory_);
  return page.is_published() ? page.durable_checkpoint.load() : 0;
}

pid_t RankMonitor::pid(pid_t fallback) const {
  const pid_t page_pid = base::telemetry::rank_page_in(memory_).pid;
  return page_pid > 0 ? page_pid : fallback;
}

job::health::RankHealth RankMonitor::health(pid_t pid, job::health::StallTimer::Clock::time_point now) {
  const base::telemetry::RankPage& page = base::telemetry::rank_page_in(memory_);
  job::health::RankHealth result{
      .rank = rank_, .is_in_world = is_in_world(), .process_state = process::process_state(this->pid(pid))};
  const pid_t page_pid = this->pid(pid);
  // The page has the pid of a child of the rank's process, and the child has exited without leaving its world.
  if (page_pid != pid && (result.process_state == '?' || result.process_state == 'Z')) result.is_in_world = false;
  const bool held = result.process_state == 't' || process::is_dumping_core(page_pid);
  ++polls_;
  // A count that grows with every sample never stalls.
  if (result.is_in_world && !held) {
    beat_timer_.sample(page.heartbeats, now);
    progress_timer_.sample(page.progress(), now);
  } else {
    beat_timer_.sample(result.process_state == 'T' ? 0 : polls_, now);
    progress_timer_.sample(polls_, now);
  }
  result.since_heartbeat = beat_timer_.stalled_for(now);
  result.since_progress = progress_timer_.stalled_for(now);
  return result;
}

}  // namespace lockstep::launcher::agent
