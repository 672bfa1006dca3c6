// The launcher's replies to `lockstep status`, for which it asks the agents of all hosts.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/status_messages.h"
#include "lockstep/launch/protocol/status_socket.h"

namespace lockstep::launcher::supervise {

/// Listens for `lockstep status`. The agents are asked only while a process has connected. A reply contains all ranks
/// of the job; those of an agent that has not replied within base::kAgentStatusTimeout are RankState::kUnknown. Not
/// thread-safe. Nothing blocks, except as AgentLink::send() does.
class StatusService {
 public:
  /// If the system refuses a socket, fd() returns -1: the job runs nevertheless. `socket_prefix` differs in tests.
  StatusService(plan::JobLabel label, const std::vector<plan::Node>& nodes,
                std::string_view socket_prefix = protocol::kStatusSocketPrefix);

  /// Returns the descriptor to poll for reading. Then call accept().
  int fd() const { return listener_ ? listener_->fd() : -1; }
  /// Accepts the processes that have connected, and asks the agents unless their replies are already awaited. An agent
  /// that has not replied to an earlier request is not sent another one.
  void accept(std::vector<hosts::AgentLink>& agents);

  /// Call it for kRankStatus and kStatusDone. Throw Error kProtocol for what this agent must not send.
  void add(std::size_t agent, protocol::RankStatus rank);
  void on_done(std::size_t agent);
  /// Call it at the end of an agent's output. `is_done`: the agent has reported that no process is left.
  void on_agent_end(std::size_t agent, bool is_done) {
    hosts_[agent].is_asked = false;
    if (is_done) hosts_[agent].state_without_reply = protocol::RankState::kExited;
  }

  /// Returns the time at which reply_if_due() must be called.
  base::Deadline deadline() const { return deadline_; }
  /// Replies to the processes that have connected if all agents have replied or the time is over.
  void reply_if_due();

 private:
  struct Host {
    std::string name;
    int first_rank = 0, num_ranks = 0;
    bool is_asked = false;    // its reply is awaited, or it is late
    bool has_replied = true;  // `ranks` is complete
    protocol::RankState state_without_reply = protocol::RankState::kUnknown;
    std::vector<protocol::RankStatus> ranks;
  };

  protocol::JobStatus collect() const;

  const plan::JobLabel label_;
  std::vector<Host> hosts_;  // one per agent
  std::optional<base::net::AbstractListener> listener_;
  std::vector<base::Fd> connections_;  // that await a reply
  base::Deadline deadline_ = base::Deadline::never();
};

}  // namespace lockstep::launcher::supervise
