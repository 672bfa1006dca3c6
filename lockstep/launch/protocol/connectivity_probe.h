// Connections between the hosts of a job, tried before a rank starts: whoever listens proves to be the host that is
// meant, and whoever connects to be of this job.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher {

/// One end. Nothing here waits: its owner polls entries() and passes them to handle(). The token is a secret of the
/// job, which came with its description; a stranger without it is dropped unanswered.
class ConnectivityProbe {
 public:
  static constexpr std::size_t kTokenBytes = 32;

  /// A secret that nobody guesses. Throws SystemError.
  static std::string make_token();
  const std::string& token() const { return token_; }

  /// `self`: the number by which others know this end.
  ConnectivityProbe(int self, std::string token);

  /// Listens on `host`, a number, at a free port, which it returns. Throws SystemError.
  base::Address listen(const std::string& host);
  /// Begins to connect to where `node` should listen, from `source` if that is not empty.
  void connect_to(const base::Address& address, int node, const std::string& source = {});

  std::vector<pollfd> entries() const;
  void handle(const std::vector<pollfd>& entries);

  /// What came of one connect_to().
  struct Outgoing {
    bool decided = false;
    std::string error;  ///< why it did not succeed
    std::string from;   ///< this end's address
    base::Fd fd;        ///< the connection
  };
  /// In the order of connect_to().
  std::vector<Outgoing>& outgoing() { return outgoing_; }
  bool all_decided() const;
  /// Whoever has no answer yet gets none.
  void fail_undecided();
  /// The connection that `node` made to the listener `index` as its `dial`th; none when there is none.
  base::Fd take_incoming(int node, std::size_t index, std::size_t dial);

 private:
  struct OutgoingState {
    int node = -1;
    bool connected = false;
    std::string answer{};
  };
  struct Unauthenticated {
    base::Fd fd;
    std::size_t listener = 0;
    std::string greeting{};
  };

  void advance(std::size_t index);
  void fail(std::size_t index, const std::string& why);
  bool read_greeting(Unauthenticated& unauthenticated);

  int self_;
  std::string token_;
  std::vector<base::Fd> listeners_;
  std::vector<Outgoing> outgoing_;
  std::vector<OutgoingState> outgoing_states_;  // one for each of outgoing_
  std::vector<Unauthenticated> unauthenticated_;
  std::map<std::tuple<int, std::size_t, std::size_t>, base::Fd> incoming_;  // node, listener, dial
};

}  // namespace lockstep::launcher
