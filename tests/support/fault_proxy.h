// Stands between a client and a server and spoils what passes: pieces of a byte, resets, ends, half ends, flipped bits.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::tests {

class FaultProxy {
 public:
  /// Listens on a port of the loopback, and connects to `target` for each connection that it gets.
  explicit FaultProxy(base::Address target);
  ~FaultProxy();
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;

  const base::Address& address() const { return address_; }

  /// From now on each byte is a segment of its own.
  void send_byte_by_byte() { chunk_size_ = 1; }
  /// Flips bit `bit` of the byte number `at` of each connection's bytes, counted from its beginning: of those to the
  /// server, or of those from it.
  void flip_bit(bool to_server, std::uint64_t at, int bit);

  /// From now on who connects is refused.
  void stop_listening();

  enum class CloseMode {
    kReset,      ///< RST both ways
    kFinish,     ///< FIN both ways
    kHalfClose,  ///< FIN to the server alone; what it sends still passes
  };
  /// Does so to all connections that there are.
  void close_connections(CloseMode how);
  /// How many connections it has had.
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

  const base::Address target_;
  std::atomic<std::size_t> chunk_size_{65536};
  std::atomic<int> count_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards what follows
  base::Fd listener_;
  const base::Address address_;
  std::list<Connection> connections_;
  bool flip_to_server_ = false;
  std::int64_t flip_at_ = -1;
  int flip_bit_ = 0;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace lockstep::tests
