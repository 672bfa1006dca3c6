#include "lockstep/base/fd.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::base {

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw SystemError("cannot create a pipe", errno);
  return {Fd(ends[0]), Fd(ends[1])};
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t size = ::write(fd, bytes.data(), bytes.size());
    if (size == 0 || (size < 0 && errno != EINTR)) return false;
    if (size > 0) bytes.remove_prefix(static_cast<std::size_t>(size));
  }
  return true;
}

void set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
    throw SystemError("cannot make descriptor " + std::to_string(fd) + " non-blocking", errno);
}

std::uint64_t raise_fd_limit(std::uint64_t required) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::uint64_t before = limit.rlim_cur;
  if (before >= required) return before;
  if (limit.rlim_max < required)
    throw SystemError("this job needs " + std::to_string(required) + " file descriptors, but the hard limit is " +
                          std::to_string(limit.rlim_max) + " (ulimit -Hn)",
                      EMFILE);
  limit.rlim_cur = required;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0)
    throw SystemError("cannot raise the limit on open file descriptors", errno);
  return before;
}

}  // namespace lockstep::base
