// An owning file descriptor, pipes, and descriptor flags and limits.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

namespace lockstep::base {

/// Owns one file descriptor and closes it on destruction; -1 means none. Lockstep opens every descriptor close-on-exec.
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

/// The two ends of a pipe.
struct Pipe {
  Fd read;
  Fd write;
};
/// Creates a pipe with both ends close-on-exec. Throws SystemError.
Pipe make_pipe();

/// Writes all of `bytes` to a descriptor that blocks. Returns false, with errno, after an error.
bool write_all(int fd, std::string_view bytes);

/// Sets O_NONBLOCK on `fd`. Throws SystemError.
void set_nonblocking(int fd);

/// Raises the soft limit on open descriptors to at least `required` and returns the previous soft limit. Throws
/// SystemError (kResource); its message has the hard limit if `required` exceeds that.
std::uint64_t raise_fd_limit(std::uint64_t required);

}  // namespace lockstep::base
