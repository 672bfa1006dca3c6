// Tests connections between the hosts of a job before the ranks start. Each listener proves which host it is, and each
// connecting host proves that it belongs to the job.
#pragma once

#include <poll.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::base::net {

/// Owns the listeners and the outgoing connections of one host. Does not block: the owner polls entries() and passes
/// the result to handle(). The token is a secret of the job; a connection that does not send it is closed without an
/// answer. Not thread-safe.
class ConnectivityProbe {
 public:
  static constexpr std::size_t kTokenBytes = 32;

  /// Returns a random token. Throws SystemError.
  static std::string make_token();
  const std::string& token() const { return token_; }

  /// `self` is the number of this host. `token` has kTokenBytes bytes.
  ConnectivityProbe(int self, std::string token);

  /// Listens at the numeric address `host` on a free port, and returns the address. Throws SystemError.
  Address listen(const std::string& host);
  /// Starts a connection to `address`, where host `node` should listen, from the address `source` if it is not empty.
  /// An error becomes the state of the connection.
  void connect_to(const Address& address, int node, const std::string& source = {});

  /// Returns the descriptors to poll.
  std::vector<pollfd> entries() const;
  /// Handles the events that poll() has stored in `entries`.
  void handle(const std::vector<pollfd>& entries);

  /// The state of one connect_to().
  struct Outgoing {
    bool decided = false;  ///< it has succeeded or failed
    std::string error;     ///< why it failed; empty: it has not failed
    std::string from;      ///< local address of the connection
    Fd fd;                 ///< the connection

   private:
    friend class ConnectivityProbe;
    int node = -1;
    bool connected = false;
    std::string answer{};
  };
  /// The states, in the order of the calls of connect_to(). The caller may move the descriptors out.
  std::vector<Outgoing>& outgoing() { return outgoing_; }
  /// Returns whether every connection has succeeded or failed.
  bool all_decided() const;
  /// Closes all connections that are not decided and marks them as failed.
  void fail_undecided();
  /// Returns the connection with the number `connection` from host `node` to the listener with the number `index`; an
  /// empty Fd if it has not arrived. The caller owns the result.
  Fd take_incoming(int node, std::size_t index, std::size_t connection);

 private:
  struct Unauthenticated {
    Fd fd;
    std::size_t listener = 0;
    std::string greeting{};
  };

  void advance(std::size_t index);
  void fail(std::size_t index, const std::string& why);
  bool read_greeting(Unauthenticated& unauthenticated);

  int self_;
  std::string token_;
  std::vector<Fd> listeners_;
  std::vector<Outgoing> outgoing_;
  std::vector<Unauthenticated> unauthenticated_;
  std::map<std::tuple<int, std::size_t, std::size_t>, Fd> incoming_;  // by node, listener and connection
};

}  // namespace lockstep::base::net
