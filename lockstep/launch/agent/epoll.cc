#include "lockstep/launch/agent/epoll.h"

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::launcher::agent {

void add_to_epoll(int epoll, int fd, std::uint64_t data, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
    throw base::SystemError("the agent cannot add a descriptor to epoll", errno);
}

}  // namespace lockstep::launcher::agent
