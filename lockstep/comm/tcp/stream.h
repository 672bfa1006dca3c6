// A connection to a peer that carries messages in order, without blocking.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <utility>

#include "lockstep/base/fd.h"

namespace lockstep::comm::tcp {

struct Operation;

/// A message of an operation, in the memory that it is sent from or received into.
struct Message {
  std::uint64_t number = 0;  ///< of the operation; equal at both ends
  char* data = nullptr;
  std::size_t bytes = 0;
  Operation* operation = nullptr;
  std::size_t step = 0;  ///< of the operation
};

/// Each message follows a header of 16 bytes, its number and its size, little-endian. A header that differs from the
/// message that is expected is an error: the ranks have compared their calls. Not thread-safe.
class MessageStream {
 public:
  explicit MessageStream(base::Fd fd = {}) : fd_(std::move(fd)) {}

  void send(const Message& message) { out_.waiting.push_back(message); }
  void receive(const Message& message) { in_.waiting.push_back(message); }

  /// Transfers a part of the next message in each direction, at most 1 MiB, and calls `done(message, sent)` for each
  /// that is complete. Returns whether anything was transferred; if not, wait for events(). Throws SystemError if the
  /// connection has ended, and Error kProtocol after a wrong header.
  template <typename Done>
  bool transfer(const Done& done) {
    bool moved = receive(done);
    if (out_.waiting.empty() || !out_.may_be_ready) return moved;
    try {
      moved = send_some() || moved;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      in_.may_be_ready = true;
      while (receive(done)) {  // what the peer had sent before the connection ended
      }
      std::rethrow_exception(error);
    }
    if (out_.is_complete()) done(out_.take(), true);
    return moved;
  }
  int fd() const { return fd_.get(); }
  /// Returns what poll(2) must wait for: POLLIN, POLLOUT, both or none.
  short events() const;
  /// Takes what poll(2) has returned.
  void set_ready(short events);
  /// Calls `drop(message)` for each message that is not complete, and forgets them.
  template <typename Drop>
  void drop_all(const Drop& drop) {
    for (Direction* each : {&out_, &in_}) {
      for (const Message& message : each->waiting) drop(message);
      each->waiting.clear();
    }
  }

 private:
  using Header = std::array<unsigned char, 16>;
  struct Direction {
    std::deque<Message> waiting;
    std::size_t moved = 0;     // bytes of the first message, including its header
    bool may_be_ready = true;  // false after a call that would have blocked
    Header header{};           // of the first message

    bool is_complete() const { return !waiting.empty() && moved == sizeof(Header) + waiting.front().bytes; }
    Message take() {
      const Message message = waiting.front();
      waiting.pop_front();
      moved = 0;
      return message;
    }
  };
  /// Fills `parts` with the rest of the first message of `direction`, at most 1 MiB; returns the number of parts.
  static int rest_of(Direction& direction, iovec (&parts)[2]);
  bool send_some();
  bool receive_some();
  template <typename Done>
  bool receive(const Done& done) {
    if (in_.waiting.empty() || !in_.may_be_ready) return false;
    const bool moved = receive_some();
    if (in_.is_complete()) done(in_.take(), false);
    return moved;
  }

  base::Fd fd_;
  Direction out_;
  Direction in_;
};

}  // namespace lockstep::comm::tcp
