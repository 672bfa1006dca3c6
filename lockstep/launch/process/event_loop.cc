#include "lockstep/launch/process/event_loop.h"

#include <cstddef>

namespace lockstep::launcher::process {

bool EventLoop::run_once() {
  std::vector<pollfd> entries;
  entries.reserve(watches_.size());
  for (const Watch& watch : watches_) entries.push_back({watch.descriptor(), watch.events, 0});
  base::Deadline next = base::Deadline::never();
  for (const Timer& timer : timers_) next = earlier(next, timer.time());
  const bool is_ready = ::poll(entries.data(), entries.size(), next.poll_ms()) > 0;
  for (std::size_t i = 0; is_ready && i < entries.size(); ++i)
    // An earlier handler may have closed the descriptor.
    if (entries[i].revents != 0 && watches_[i].descriptor() == entries[i].fd) watches_[i].handler();
  for (const Timer& timer : timers_)
    if (timer.time().expired()) timer.handler();
  return is_ready;
}

}  // namespace lockstep::launcher::process
