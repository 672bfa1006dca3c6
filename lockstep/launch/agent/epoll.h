// Adds descriptors to the epoll instance of an agent.
#pragma once

#include <sys/epoll.h>

#include <cstdint>

namespace lockstep::launcher::agent {

/// Adds `fd` to the instance `epoll` for `events` (EPOLLIN ...), which are reported with `data`. Throws SystemError.
void add_to_epoll(int epoll, int fd, std::uint64_t data, std::uint32_t events);

}  // namespace lockstep::launcher::agent
