// A TCP proxy between a client and a server that injects faults: one-byte segments, resets, closed and half-closed
// connections, flipped bits.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::tests {

/// All methods are thread-safe. A thread of its own forwards the bytes.
class FaultProxy {
 public:
  /// Listens on a port of the loopback interface, and connects to `target` for each connection that it accepts.
  explicit FaultProxy(base::net::Address target);
  ~FaultProxy();
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;

  const base::net::Address& address() const { return address_; }

  /// From now on sends each byte as a segment of its own.
  void send_byte_by_byte() { chunk_size_ = 1; }
  /// Flips bit `bit` of byte number `at` of each connection, counted from the beginning of its bytes to the server, or
  /// of those from the server.
  void flip_bit(bool to_server, std::uint64_t at, int bit);

  /// From now on new connections are refused.
  void stop_listening();

  enum class CloseMode {
    kReset,      ///< RST both ways
    kFinish,     ///< FIN both ways
    kHalfClose,  ///< FIN to the server only; its bytes are still forwarded
  };
  /// Closes all present connections in this way.
  void close_connections(CloseMode how);
  /// Returns the number of connections accepted so far.
  int num_connections() const { return count_; }

 private:
  struct Stream {
    std::uint64_t forwarded_bytes = 0;
    bool is_closed = false;
  };
  struct Connection {
    base::Fd client, server;
    Stream to_server, to_client;
  };
  void run();
  void accept();
  bool forward(Connection& connection, bool to_server);

  const base::net::Address target_;
  std::atomic<std::size_t> chunk_size_{65536};
  std::atomic<int> count_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards the members below
  base::Fd listener_;
  const base::net::Address address_;
  std::list<Connection> connections_;
  bool flip_to_server_ = false;
  std::int64_t flip_at_ = -1;
  int flip_bit_ = 0;
  std::thread thread_;  // last, because it uses the other members
};

}  // namespace lockstep::tests
