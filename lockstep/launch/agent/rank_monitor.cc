#include "lockstep/launch/agent/rank_monitor.h"

#include <unistd.h>

#include <cstring>

#include "lockstep/launch/process/stack_dump.h"

namespace lockstep::launcher {

RankMonitor::RankMonitor(int rank, const job::JobKey& key) : rank_(rank), memory_(base::create_rank_page()) {
  base::RankPage& page = base::rank_page_in(memory_);
  page.agent_pid = ::getpid();
  std::memcpy(page.key.data(), key.bytes().data(), page.key.size());
}

namespace {

/// The program that writes it has the same idea of a page.
bool is_published(const base::RankPage& page) {
  return std::memcmp(page.magic, base::RankPage::kMagic, sizeof page.magic) == 0;
}

}  // namespace

bool RankMonitor::is_in_world() const {
  const base::RankPage& page = base::rank_page_in(memory_);
  return is_published(page) && page.has_left == 0;
}

std::int64_t RankMonitor::saved() const {
  const base::RankPage& page = base::rank_page_in(memory_);
  return is_published(page) ? page.durable_checkpoint.load() : 0;
}

pid_t RankMonitor::pid(pid_t fallback) const {
  const pid_t shown = base::rank_page_in(memory_).pid;
  return shown > 0 ? shown : fallback;
}

job::RankHealth RankMonitor::pulse(pid_t pid, job::StallTimer::Clock::time_point now) {
  const base::RankPage& page = base::rank_page_in(memory_);
  job::RankHealth pulse{.rank = rank_, .is_in_world = is_in_world(), .state = process_state(this->pid(pid))};
  const pid_t shown = this->pid(pid);
  // A program that a rank of several processes has started, and that has ended without saying so.
  if (shown != pid && (pulse.process_state == '?' || pulse.process_state == 'Z')) pulse.is_in_world = false;
  const bool held = pulse.process_state == 't' || is_dumping_core(shown);
  ++polls_;
  // A count that grows with every look is one that never stands still.
  if (pulse.is_in_world && !held) {
    beat_timer_.sample(page.heartbeats, now);
    progress_timer_.sample(page.progress(), now);
  } else {
    beat_timer_.sample(pulse.process_state == 'T' ? 0 : polls_, now);
    progress_timer_.sample(polls_, now);
  }
  pulse.since_heartbeat = beat_timer_.stalled_for(now);
  pulse.since_progress = progress_timer_.stalled_for(now);
  return pulse;
}

}  // namespace lockstep::launcher
