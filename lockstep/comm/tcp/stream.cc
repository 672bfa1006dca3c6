#include "lockstep/comm/tcp/stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::comm::tcp {
namespace {

constexpr std::size_t kMaxTransferBytes = 1 << 20;

void put(unsigned char* to, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) to[i] = static_cast<unsigned char>(value >> (8 * i));
}

std::uint64_t get(const unsigned char* from) {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= static_cast<std::uint64_t>(from[i]) << (8 * i);
  return value;
}

/// Whether `result` of a call for `what` moved bytes; throws if the connection has ended.
bool has_moved(const char* what, ssize_t result) {
  if (result > 0) return true;
  if (result < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  throw base::SystemError(what, result == 0 ? ECONNRESET : errno, base::Cause::kPeerUnreachable);
}

}  // namespace

short MessageStream::events() const {
  return static_cast<short>((out_.waiting.empty() ? 0 : POLLOUT) | (in_.waiting.empty() ? 0 : POLLIN));
}

void MessageStream::set_ready(short events) {
  if (events & ~POLLIN) out_.may_be_ready = true;  // also after an error or the end of the connection
  if (events & ~POLLOUT) in_.may_be_ready = true;
}

int MessageStream::rest_of(Direction& direction, iovec (&parts)[2]) {
  const Message& message = direction.waiting.front();
  const std::size_t in_header = std::min(direction.moved, sizeof(Header));
  const std::size_t in_data = direction.moved - in_header;
  parts[0] = {direction.header.data() + in_header, sizeof(Header) - in_header};
  parts[1] = {message.data + in_data, std::min(message.bytes - in_data, kMaxTransferBytes)};
  return parts[1].iov_len > 0 ? 2 : 1;
}

bool MessageStream::send_some() {
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

bool MessageStream::receive_some() {
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

}  // namespace lockstep::comm::tcp
