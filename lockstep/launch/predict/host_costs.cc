#include "lockstep/launch/predict/host_costs.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher::predict {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = std::size_t{64} << 20, kPiece = std::size_t{64} << 10;

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

double copy_s_per_byte() {
  const std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes);
  double best = 1;
  for (int run = 0; run < 3; ++run) {
    const auto begun = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), kBytes);
    best = std::min(best, seconds_since(begun) / kBytes);
  }
  return best;
}

double wire_s_per_byte() {
  const base::Fd listener = base::net::listen_on({"127.0.0.1", 0});
  const base::Fd sender = base::net::connect_to(base::net::local_address(listener.get()), Deadline::in(10s));
  if (!base::net::wait_readable(listener.get(), Deadline::in(10s)))
    throw base::SystemError("a connection on loopback", ETIMEDOUT);
  const base::Fd receiver = base::net::try_accept(listener.get());
  if (receiver.get() < 0) throw base::SystemError("a connection on loopback", errno);
  std::vector<char> piece(kPiece, 1);
  const auto begun = std::chrono::steady_clock::now();
  for (std::size_t sent = 0; sent < kBytes; sent += kPiece) {
    base::net::send_all(sender.get(), {piece.data(), piece.size()}, Deadline::in(10s));
    if (!base::net::recv_all(receiver.get(), piece.data(), piece.size(), Deadline::in(10s)))
      throw base::SystemError("a connection on loopback", ECONNRESET);
  }
  return seconds_since(begun) / kBytes;
}

}  // namespace

HostCosts measure_host_costs() {
  return {.wire_s_per_byte = wire_s_per_byte(), .memory_s_per_byte = copy_s_per_byte()};
}

}  // namespace lockstep::launcher::predict
