// The event loop of the launcher and of its agents.
#pragma once

#include <poll.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launcher::process {

/// Waits for descriptors and deadlines, and calls their handlers. Each wait calls all functions for their descriptors
/// and times again, so a handler only changes its own object, and nothing is ever removed. Not thread-safe.
class EventLoop {
 public:
  using Descriptor = std::function<int()>;  ///< returns -1 while there is nothing to wait for
  using Time = std::function<base::Deadline()>;
  using Handler = std::function<void()>;

  /// Calls `handler` when the descriptor can be read, or has ended.
  void on_readable(Descriptor descriptor, Handler handler) {
    watches_.push_back({std::move(descriptor), POLLIN, std::move(handler)});
  }
  /// Calls `handler` when the descriptor can be written, or its reader has ended.
  void on_writable(Descriptor descriptor, Handler handler) {
    watches_.push_back({std::move(descriptor), POLLOUT, std::move(handler)});
  }
  /// Calls `handler` when the time has come. The handler must move the time, or it is called again at once.
  void at(Time time, Handler handler) { timers_.push_back({std::move(time), std::move(handler)}); }

  /// Blocks until a descriptor is ready or a time has come, for at most a minute, and calls the handlers: those of
  /// descriptors in the order in which they were added, then those of times. Returns whether a descriptor was ready.
  /// Throws what the handlers throw.
  bool run_once() {
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

 private:
  struct Watch {
    Descriptor descriptor;
    short events;
    Handler handler;
  };
  struct Timer {
    Time time;
    Handler handler;
  };
  std::deque<Watch> watches_;  // a handler may add one
  std::vector<Timer> timers_;
};

}  // namespace lockstep::launcher::process
