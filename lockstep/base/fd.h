// A file descriptor that closes itself.
#pragma once

#include <cstdint>
#include <utility>

namespace lockstep::base {

/// Owns one descriptor; -1 is none. Everything that Lockstep opens is close-on-exec.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

/// A pipe, both ends close-on-exec. Throws SystemError.
struct Pipe {
  Fd read;
  Fd write;
};
Pipe make_pipe();

/// Switches O_NONBLOCK on. Throws SystemError.
void set_nonblocking(int fd);

/// Raises the soft limit of descriptors to at least `need`. Returns the soft limit there was. Throws SystemError
/// (RESOURCE) saying what is allowed when the hard limit forbids it.
std::uint64_t raise_fd_limit(std::uint64_t required);

}  // namespace lockstep::base
