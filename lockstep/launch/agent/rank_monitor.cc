#include "lockstep/launch/agent/rank_monitor.h"

#include <unistd.h>

#include <cstring>

#include "lockstep/launch/process/stack_dump.h"

namespace lockstep::launcher {

RankWatch::RankWatch(int rank, const job::JobKey& key) : rank_(rank), memory_(base::make_rank_page()) {
  base::RankPage& page = base::page_in(memory_);
  page.watcher = ::getpid();
  std::memcpy(page.key.data(), key.bytes().data(), page.key.size());
}

namespace {

/// The program that writes it has the same idea of a page.
bool is_shown(const base::RankPage& page) {
  return std::memcmp(page.magic, base::RankPage::kMagic, sizeof page.magic) == 0;
}

}  // namespace

bool RankWatch::in_world() const {
  const base::RankPage& page = base::page_in(memory_);
  return is_shown(page) && page.left == 0;
}

std::int64_t RankWatch::saved() const {
  const base::RankPage& page = base::page_in(memory_);
  return is_shown(page) ? page.saved.load() : 0;
}

pid_t RankWatch::pid(pid_t otherwise) const {
  const pid_t shown = base::page_in(memory_).pid;
  return shown > 0 ? shown : otherwise;
}

job::Pulse RankWatch::pulse(pid_t pid, job::StandingStill::Clock::time_point now) {
  const base::RankPage& page = base::page_in(memory_);
  job::Pulse pulse{.rank = rank_, .in_world = in_world(), .state = state_of_process(this->pid(pid))};
  const pid_t shown = this->pid(pid);
  // A program that a rank of several processes has started, and that has ended without saying so.
  if (shown != pid && (pulse.state == '?' || pulse.state == 'Z')) pulse.in_world = false;
  const bool held = pulse.state == 't' || dumps_core(shown);
  ++looks_;
  // A count that grows with every look is one that never stands still.
  if (pulse.in_world && !held) {
    beats_.look(page.beats, now);
    progress_.look(page.progress(), now);
  } else {
    beats_.look(pulse.state == 'T' ? 0 : looks_, now);
    progress_.look(looks_, now);
  }
  pulse.silent = beats_.lasts(now);
  pulse.idle = progress_.lasts(now);
  return pulse;
}

}  // namespace lockstep::launcher
