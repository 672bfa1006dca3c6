#include "lockstep/launch/agent/status_responder.h"

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/launch/protocol/status_socket.h"

namespace lockstep::launcher::agent {

StatusResponder::StatusResponder(plan::JobLabel label) : label_(std::move(label)), host_(base::net::host_name()) {
  try {
    listener_.emplace(protocol::kStatusSocketPrefix);
  } catch (const base::SystemError&) {
    // See fd().
  }
}

void StatusResponder::reply(const std::function<std::vector<protocol::RankStatus>()>& find_ranks) const {
  while (const base::Fd connection = listener_->try_accept()) {
    protocol::JobStatus job{.label = label_, .is_whole = false, .ranks = find_ranks()};
    for (protocol::RankStatus& rank : job.ranks) rank.host = host_;
    protocol::send_job_status(connection.get(), job);
  }
}

}  // namespace lockstep::launcher::agent
