// A connection to a peer that carries messages in order, without blocking.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
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
  /// Returns what poll(2) must wait for: POLLIN, POLLOUT, both or none. POLLIN also if no message is expected, so that
  /// one which is expected later needs no other poll(), but not once bytes have arrived that nobody expects yet.
  short events() const {
    return static_cast<short>((out_.waiting.empty() ? 0 : POLLOUT) |
                              (in_.waiting.empty() && has_unexpected_ ? 0 : POLLIN));
  }
  /// Takes what poll(2) has returned.
  void set_ready(short events) {
    if (events & ~POLLIN) out_.may_be_ready = true;  // also after an error or the end of the connection
    if (events & ~POLLOUT) {
      in_.may_be_ready = true;
      has_unexpected_ = in_.waiting.empty();
    }
  }
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
  static constexpr std::size_t kMaxTransferBytes = 1 << 20;

  static void put(unsigned char* to, std::uint64_t value) {
    for (int i = 0; i < 8; ++i) to[i] = static_cast<unsigned char>(value >> (8 * i));
  }

  static std::uint64_t get(const unsigned char* from) {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= static_cast<std::uint64_t>(from[i]) << (8 * i);
    return value;
  }

  /// Whether `result` of a call for `what` moved bytes; throws if the connection has ended.
  static bool has_moved(const char* what, ssize_t result) {
    if (result > 0) return true;
    if (result < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    throw base::SystemError(what, result == 0 ? ECONNRESET : errno, base::Cause::kPeerUnreachable);
  }

  /// Fills `parts` with the rest of the first message of `direction`, at most 1 MiB; returns the number of parts.
  static int rest_of(Direction& direction, iovec (&parts)[2]) {
    const Message& message = direction.waiting.front();
    const std::size_t in_header = std::min(direction.moved, sizeof(Header));
    const std::size_t in_data = direction.moved - in_header;
    parts[0] = {direction.header.data() + in_header, sizeof(Header) - in_header};
    parts[1] = {message.data + in_data, std::min(message.bytes - in_data, kMaxTransferBytes)};
    return parts[1].iov_len > 0 ? 2 : 1;
  }
  bool send_some() {
    if (out_.moved == 0) {
      put(out_.header.data(), out_.waiting.front().number);
      put(out_.header.data() + 8, out_.waiting.front().bytes);
    }
    iovec parts[2];
    msghdr all{};
    all.msg_iov = parts;
    all.msg_iovlen = static_cast<std::size_t>(rest_of(out_, parts));
    const ssize_t sent = ::sendmsg(fd_.get(), &all, MSG_NOSIGNAL);
    out_.may_be_ready = has_moved("send", sent);
    if (!out_.may_be_ready) return false;
    out_.moved += static_cast<std::size_t>(sent);
    return true;
  }
  bool receive_some() {
    iovec parts[2];
    const bool had_header = in_.moved >= sizeof(Header);
    const ssize_t received = ::readv(fd_.get(), parts, rest_of(in_, parts));
    in_.may_be_ready = has_moved("receive", received);
    if (!in_.may_be_ready) return false;
    in_.moved += static_cast<std::size_t>(received);
    if (had_header || in_.moved < sizeof(Header)) return true;
    const std::uint64_t number = get(in_.header.data()), bytes = get(in_.header.data() + 8);
    const Message& expected = in_.waiting.front();
    if (number != expected.number || bytes != expected.bytes)
      throw base::Error(base::Cause::kProtocol, "received operation " + std::to_string(number) + " with " +
                                                    std::to_string(bytes) + " bytes; expected operation " +
                                                    std::to_string(expected.number) + " with " +
                                                    std::to_string(expected.bytes));
    return true;
  }
  template <typename Done>
  bool receive(const Done& done) {
    if (in_.waiting.empty() || !in_.may_be_ready) return false;
    has_unexpected_ = false;
    const bool moved = receive_some();
    if (in_.is_complete()) done(in_.take(), false);
    return moved;
  }

  base::Fd fd_;
  Direction out_;
  Direction in_;
  bool has_unexpected_ = false;
};

}  // namespace lockstep::comm::tcp
