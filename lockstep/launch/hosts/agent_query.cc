#include "lockstep/launch/hosts/agent_query.h"

#include <poll.h>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/connectivity_probe.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/hosts/start_agents.h"

namespace lockstep::launcher::hosts {

/// Reads the frames of one agent. Returns whether the agent has replied or is lost.
bool AgentQuery::read_reply(std::size_t i, protocol::FrameKind reply, const OnReply& take) {
  AgentLink& agent = agents_[i];
  std::string why;
  try {
    for (const protocol::Frame& frame : agent.read()) {
      if (frame.kind != reply) protocol::throw_unexpected(frame.kind);
      take(i, frame.payload);
      return true;
    }
  } catch (const base::Error& error) {
    why = std::string("its output is not from a Lockstep agent: ") + error.what();
  }
  if (why.empty() && agent.descriptor() >= 0) return false;
  if (why.empty())
    why = "its agent exited before it replied" +
          (agent.stderr_text().empty() ? "" : ": " + base::quoted(agent.stderr_text(), 512));
  on_lost_(i, why);
  return true;
}

void AgentQuery::ask(const std::vector<std::size_t>& agents, protocol::FrameKind request, const MakePayload& payload,
                     protocol::FrameKind reply, std::chrono::seconds limit, const OnReply& take) {
  for (const std::size_t i : agents) agents_[i].send({request, -1, payload(i)});
  std::vector<std::size_t> missing = agents;
  for (const base::Deadline deadline = base::Deadline::in(limit); !missing.empty() && !deadline.expired();) {
    std::vector<pollfd> entries = {{signals_, POLLIN, 0}};
    for (const std::size_t i : missing) entries.push_back({agents_[i].descriptor(), POLLIN, 0});
    const std::vector<pollfd> connectivity = connectivity_.entries();
    entries.insert(entries.end(), connectivity.begin(), connectivity.end());
    ::poll(entries.data(), entries.size(), deadline.poll_ms());
    if (entries[0].revents) check_interrupted(signals_);
    connectivity_.handle({entries.begin() + 1 + static_cast<std::ptrdiff_t>(missing.size()), entries.end()});
    std::vector<std::size_t> left;
    for (std::size_t k = 0; k < missing.size(); ++k)
      if (!entries[k + 1].revents || !read_reply(missing[k], reply, take)) left.push_back(missing[k]);
    missing = std::move(left);
  }
  for (const std::size_t i : missing)
    on_lost_(i, "its agent did not reply within " + std::to_string(limit.count()) + " s");
}

}  // namespace lockstep::launcher::hosts
