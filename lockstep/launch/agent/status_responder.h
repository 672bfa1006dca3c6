// The agent's reply to `lockstep status` on its host.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/status_messages.h"

namespace lockstep::launcher::agent {

/// Listens for `lockstep status`. Not thread-safe. Nothing blocks.
class StatusResponder {
 public:
  /// If the system refuses a socket, fd() returns -1: the job runs nevertheless, and `lockstep status` lists only the
  /// ranks that it finds by itself.
  explicit StatusResponder(plan::JobLabel label);

  /// Returns the descriptor to poll for reading. Then call reply().
  int fd() const { return listener_ ? listener_->fd() : -1; }
  /// Replies to all processes of this user that have connected. Calls `find_ranks` for each.
  void reply(const std::function<std::vector<protocol::RankStatus>()>& find_ranks) const;

 private:
  const plan::JobLabel label_;
  const std::string host_;
  std::optional<base::net::AbstractListener> listener_;
};

}  // namespace lockstep::launcher::agent
