#include "lockstep/comm/channel/host_watch.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/timeouts.h"

namespace lockstep::comm::channel {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kAddressLimit = 2s;
constexpr auto kRetryInterval = 1s;         // a new attempt is faster than the kernel's retransmissions, which double
constexpr std::size_t kMaxAccepted = 1024;  // further ones are closed, which also answers
constexpr auto kMaxCheckGap = 3s;           // after a longer one, silence in the meantime says nothing

std::string key_of(int host) { return "host-watch/" + std::to_string(host); }

bool first_on_host(int rank, const std::vector<int>& ranks, const std::vector<int>& host_of_rank) {
  const int host = host_of_rank[static_cast<std::size_t>(rank)];
  return std::none_of(ranks.begin(), ranks.end(),
                      [&](int other) { return other < rank && host_of_rank[static_cast<std::size_t>(other)] == host; });
}

}  // namespace

HostWatch::HostWatch(std::shared_ptr<job::Store> store, int rank, std::vector<int> host_of_rank,
                     const std::string& address)
    : store_(std::move(store)), rank_(rank), host_of_rank_(std::move(host_of_rank)) {
  std::vector<int> all;
  for (std::size_t other = 0; other < host_of_rank_.size(); ++other) all.push_back(static_cast<int>(other));
  if (!first_on_host(rank_, all, host_of_rank_)) return;
  listener_ = base::net::listen_on({address, 0});
  store_->set(key_of(host_of_rank_[static_cast<std::size_t>(rank_)]),
              base::net::to_string(base::net::local_address(listener_.get())) + " " + base::net::host_name(),
              Deadline::in(kAddressLimit));
}

/// Keeps the queue of the listener short, whoever connects to it.
void HostWatch::accept_connections() {
  while (listener_) {
    base::Fd accepted = base::net::try_accept(listener_.get());
    if (!accepted) return;
    if (accepted_.size() < kMaxAccepted) accepted_.push_back(std::move(accepted));
  }
}

bool HostWatch::find_address(Link& link, int host) {
  if (!link.name.empty()) return true;
  const auto text = store_->find(key_of(host), Deadline::in(kAddressLimit));
  if (!text) return false;
  const std::size_t space = text->find(' ');
  link.address = base::net::parse_address("the address of a host", text->substr(0, space));
  link.name = space == std::string::npos ? "?" : text->substr(space + 1);
  return true;
}

/// Starts, continues or examines the connection. Returns whether the host has answered; `timed_out`: the kernel has
/// found it silent for the whole time limit.
bool HostWatch::answers(Link& link, Clock::time_point now, bool& timed_out) {
  if (!link.fd) {
    link.connected = false;
    link.attempted = now;
    try {
      link.fd = base::net::start_connect(link.address, "");
    } catch (const base::SystemError&) {
      return false;  // no route
    }
    return false;
  }
  pollfd state{.fd = link.fd.get(), .events = static_cast<short>(link.connected ? POLLIN : POLLOUT), .revents = 0};
  if (::poll(&state, 1, 0) == 0) {
    if (link.connected) return true;
    if (now - link.attempted < kRetryInterval) return false;
    link.fd.reset();
    return answers(link, now, timed_out);  // makes a new attempt
  }
  const int error = base::net::connect_error(link.fd.get());
  if (error == 0 && !link.connected) return link.connected = true;
  timed_out = link.connected && error == ETIMEDOUT;
  link.fd.reset();
  return error == 0 || !base::net::is_unreachable(error);  // a process that has ended: its host has answered
}

bool HostWatch::is_lost(Link& link) {
  const auto now = Clock::now();
  const bool is_first = now - link.checked > kMaxCheckGap;
  link.checked = now;
  if (is_first && !link.connected) link.fd.reset();
  bool timed_out = false;
  if (answers(link, now, timed_out) || is_first) {
    link.silent_since = now;
    return false;
  }
  return timed_out || now - link.silent_since >= base::net::host_timeout() + base::kHostTimeoutMargin;
}

std::optional<HostWatch::LostHost> HostWatch::check(const std::vector<int>& members) {
  if (!first_on_host(rank_, members, host_of_rank_)) return std::nullopt;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return std::nullopt;  // another wait is checking
  accept_connections();
  for (const int member : members) {
    const int host = host_of_rank_[static_cast<std::size_t>(member)];
    if (host == host_of_rank_[static_cast<std::size_t>(rank_)] || !first_on_host(member, members, host_of_rank_))
      continue;
    Link& link = links_[host];
    if (!find_address(link, host) || !is_lost(link)) continue;
    LostHost lost{.name = link.name, .address = link.address.host, .ranks = {}};
    for (std::size_t rank = 0; rank < host_of_rank_.size(); ++rank)
      if (host_of_rank_[rank] == host) lost.ranks.push_back(static_cast<int>(rank));
    return lost;
  }
  return std::nullopt;
}

}  // namespace lockstep::comm::channel
