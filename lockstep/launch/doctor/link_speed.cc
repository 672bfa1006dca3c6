#include "lockstep/launch/doctor/link_speed.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::launcher::doctor {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr std::size_t kPingBytes = 64;
constexpr int kRoundTrips = 100;
constexpr std::uint64_t kMaxBytes = std::uint64_t{64} << 20;
constexpr auto kMaxTime = 1s;
constexpr char kEcho = 1, kBulk = 2;  // the first byte of a ping: the peer echoes it, or bulk data follows

std::int64_t ns_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begun).count();
}

std::int64_t median_round_trip(int fd, Deadline deadline) {
  std::vector<std::int64_t> times;
  std::array<char, kPingBytes> ping{};
  ping[0] = kEcho;
  const Deadline time_limit = Deadline::in(kMaxTime);
  while (times.empty() || (times.size() < kRoundTrips && !time_limit.expired())) {
    const auto begun = std::chrono::steady_clock::now();
    base::net::send_all(fd, {ping.data(), ping.size()}, deadline);
    if (!base::net::recv_all(fd, ping.data(), ping.size(), deadline))
      throw base::SystemError("the other host ended the measurement", ECONNRESET);
    times.push_back(ns_since(begun));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

/// Sends until the peer replies that it has received enough. On a slow network it replies before all bytes have
/// arrived.
void send_until_answered(int fd, Deadline deadline) {
  const std::vector<char> bytes(std::size_t{256} << 10);
  for (std::uint64_t sent = 0; !deadline.expired();) {
    pollfd entry = {fd, static_cast<short>(POLLIN | (sent < kMaxBytes ? POLLOUT : 0)), 0};
    ::poll(&entry, 1, deadline.poll_ms());
    if (entry.revents & ~POLLOUT) return;
    if (!(entry.revents & POLLOUT)) continue;
    const ssize_t size =
        ::send(fd, bytes.data(), std::min<std::uint64_t>(bytes.size(), kMaxBytes - sent), MSG_NOSIGNAL);
    if (size < 0 && errno != EAGAIN && errno != EINTR)
      throw base::SystemError("send", errno, base::Cause::kPeerUnreachable);
    sent += static_cast<std::uint64_t>(std::max<ssize_t>(size, 0));
  }
}

/// Returns the number of bytes received, and the time in ns.
std::array<std::int64_t, 2> receive(int fd, Deadline deadline) {
  std::vector<char> bytes(std::size_t{256} << 10);
  std::uint64_t got = 0;
  const auto begun = std::chrono::steady_clock::now();
  const Deadline time_limit = earlier(deadline, Deadline::in(kMaxTime));
  while (got < kMaxBytes && base::net::wait_readable(fd, time_limit)) {
    const ssize_t size = ::recv(fd, bytes.data(), bytes.size(), 0);
    if (size == 0) break;
    if (size < 0 && errno != EAGAIN && errno != EINTR)
      throw base::SystemError("receive", errno, base::Cause::kPeerUnreachable);
    got += static_cast<std::uint64_t>(std::max<ssize_t>(size, 0));
    if (time_limit.expired()) break;
  }
  return {static_cast<std::int64_t>(got), ns_since(begun)};
}

/// Reads the bytes that are still in flight. Closing a connection with unread bytes would reset it, and the reply could
/// be lost.
void drain(int fd, Deadline deadline) {
  std::vector<char> bytes(std::size_t{256} << 10);
  while (base::net::wait_readable(fd, deadline)) {
    const ssize_t size = ::recv(fd, bytes.data(), bytes.size(), 0);
    if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) return;
  }
}

}  // namespace

LinkSpeed measure_link(int fd, Deadline deadline) {
  LinkSpeed speed;
  speed.round_trip_ns = median_round_trip(fd, deadline);
  std::array<char, kPingBytes> ping{};
  ping[0] = kBulk;
  base::net::send_all(fd, {ping.data(), ping.size()}, deadline);
  send_until_answered(fd, deadline);
  std::array<std::int64_t, 2> answer{};
  if (!base::net::recv_all(fd, answer.data(), sizeof answer, deadline))
    throw base::SystemError("the other host ended the measurement", ECONNRESET);
  if (answer[0] < 1 || answer[1] < 1) throw base::SystemError("nothing arrived within a second", ETIMEDOUT);
  speed.bytes = static_cast<std::uint64_t>(answer[0]);
  speed.ns = answer[1];
  return speed;
}

void serve_link(int fd, Deadline deadline) {
  std::array<char, kPingBytes> ping{};
  while (base::net::recv_all(fd, ping.data(), ping.size(), deadline)) {
    if (ping[0] != kBulk) {
      base::net::send_all(fd, {ping.data(), ping.size()}, deadline);
      continue;
    }
    const std::array<std::int64_t, 2> answer = receive(fd, deadline);
    base::net::send_all(fd, {reinterpret_cast<const char*>(answer.data()), sizeof answer}, deadline);
    return drain(fd, earlier(deadline, Deadline::in(2s)));
  }
}

}  // namespace lockstep::launcher::doctor
