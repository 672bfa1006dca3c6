#include "lockstep/launch/supervise/status_service.h"

#include <algorithm>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::supervise {
StatusService::StatusService(plan::JobLabel label, const std::vector<plan::Node>& nodes, std::string_view socket_prefix)
    : label_(std::move(label)) {
  int first = 0;
  for (const plan::Node& node : nodes) {
    hosts_.push_back({.name = node.name, .first_rank = first, .num_ranks = node.ranks, .ranks = {}});
    first += node.ranks;
  }
  try {
    listener_.emplace(socket_prefix);
  } catch (const base::SystemError&) {
    // See fd().
  }
}

void StatusService::accept(std::vector<hosts::AgentLink>& agents) {
  const bool is_asking = !connections_.empty();
  while (base::Fd connection = listener_->try_accept()) connections_.push_back(std::move(connection));
  if (is_asking || connections_.empty()) return;
  deadline_ = base::Deadline::in(base::kAgentStatusTimeout);
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    hosts_[i].has_replied = false;
    if (hosts_[i].is_asked || agents[i].descriptor() < 0) continue;
    hosts_[i].ranks.clear();
    hosts_[i].is_asked = true;
    agents[i].send({protocol::FrameKind::kStatusRequest, -1, {}});
  }
}

void StatusService::add(std::size_t agent, protocol::RankStatus rank) {
  Host& host = hosts_[agent];
  if (!host.is_asked || rank.rank < host.first_rank || rank.rank >= host.first_rank + host.num_ranks ||
      host.ranks.size() >= static_cast<std::size_t>(host.num_ranks))
    protocol::throw_protocol_error("an unexpected status of rank " + std::to_string(rank.rank));
  rank.host = host.name;
  host.ranks.push_back(std::move(rank));
}

void StatusService::on_done(std::size_t agent) {
  if (!std::exchange(hosts_[agent].is_asked, false)) protocol::throw_protocol_error("an unexpected end of a status");
  hosts_[agent].has_replied = true;
}

/// Returns all ranks, in their order.
protocol::JobStatus StatusService::collect() const {
  protocol::JobStatus job{.label = label_, .is_whole = true, .ranks = {}};
  for (const Host& host : hosts_) {
    if (host.has_replied) job.ranks.insert(job.ranks.end(), host.ranks.begin(), host.ranks.end());
    for (int rank = host.first_rank; !host.has_replied && rank < host.first_rank + host.num_ranks; ++rank)
      job.ranks.push_back({.rank = rank, .host = host.name, .state = host.state_without_reply});
  }
  return job;
}

void StatusService::reply_if_due() {
  const bool is_complete = std::ranges::none_of(hosts_, [](const Host& host) { return host.is_asked; });
  if (connections_.empty() || (!is_complete && !deadline_.expired())) return;
  const protocol::JobStatus job = collect();
  for (const base::Fd& connection : connections_) protocol::send_job_status(connection.get(), job);
  connections_.clear();
  deadline_ = base::Deadline::never();  // bounded: no process awaits a reply
}

}  // namespace lockstep::launcher::supervise
