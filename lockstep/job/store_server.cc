#include "lockstep/job/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/thread.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/join.h"
#include "lockstep/job/store_session.h"

namespace lockstep::job {
namespace {

using base::Deadline;

constexpr std::size_t kMaxUnauthenticated = 64;  // number of connections
constexpr auto kHandshakeTimeout = std::chrono::seconds(2);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

struct ServerConnection {
  ServerConnection(base::Fd from, const Credentials& credentials, std::uint64_t server, LocalStore& store)
      : fd(std::move(from)), session(credentials, server, store) {}

  base::Fd fd;
  StoreSession session;
  Deadline handshake_deadline = Deadline::in(kHandshakeTimeout);
  bool is_counted = false;  // in connections_per_rank
  bool has_events = true;   // readable, writable or closed
};

std::uint64_t random_number() {
  const Mac bytes = random_nonce();
  std::uint64_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

std::string closed_record() { return encode(ExitRecord{.kind = ExitKind::kClosed}); }

}  // namespace

struct StoreServer::Impl {
  Impl(const base::net::Address& where, Credentials expected, bool reports)
      : credentials(std::move(expected)),
        publish_rank_exits(reports),
        listener(base::net::listen_on(where)),
        address(base::net::local_address(listener.get())),
        wake_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_fd) throw base::SystemError("cannot create an eventfd", errno);
    // Every change wakes the thread, because it may answer a waiting request. This includes changes by the thread
    // itself, which cause one more iteration.
    store.on_change([this] { wake_thread(); });
    thread = base::start_thread([this] { serve(); });
  }
  ~Impl() {
    stop = true;
    wake_thread();
    thread.join();  // bounded: serve() checks `stop` after every wake-up
  }

  void wake_thread() { ::eventfd_write(wake_fd.get(), 1); }

  void serve() {
    while (!stop) {
      wait_for_events();
      accept_pending();
      for (auto at = connections.begin(); at != connections.end();) {
        const int error = serve_connection(*at);
        at->has_events = false;
        if (error != 0) connection_ended(*at, error);
        at = error == 0 ? std::next(at) : connections.erase(at);
      }
      drop_unauthenticated();
      if (report_unreachable_at.expired()) report_unreachable();
    }
  }

  void wait_for_events() {
    // While accept() fails because no descriptors are left, do not poll the listener: every poll() would return at
    // once.
    const bool listening = accept_again.expired();
    std::vector<pollfd> entries{{wake_fd.get(), POLLIN, 0}, {listening ? listener.get() : -1, POLLIN, 0}};
    Deadline next = earlier(Deadline::in(std::chrono::minutes(1)), report_unreachable_at);
    if (!listening) next = earlier(next, accept_again);
    for (ServerConnection& c : connections) {
      entries.push_back({c.fd.get(), static_cast<short>(c.session.output().empty() ? POLLIN : POLLIN | POLLOUT), 0});
      next = earlier(next, c.session.is_authenticated() ? c.session.wait_until() : c.handshake_deadline);
    }
    ::poll(entries.data(), entries.size(), next.poll_ms());
    auto entry = entries.begin() + 2;
    for (ServerConnection& c : connections) c.has_events = (entry++)->revents != 0;
    std::uint64_t count = 0;
    while (::read(wake_fd.get(), &count, sizeof count) > 0) {
    }
  }

  void accept_pending() {
    for (std::size_t i = 0; i < kMaxUnauthenticated; ++i) {
      errno = 0;
      base::Fd fd = base::net::try_accept(listener.get());
      if (!fd) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
          accept_again = Deadline::in(kAcceptPause);
        return;
      }
      connections.emplace_back(std::move(fd), credentials, number, store);
    }
  }

  // Drops the oldest unauthenticated connections above the limit. Ranks send their hello at once, so many silent
  // connections do not keep them out.
  void drop_unauthenticated() {
    std::size_t num_unauthenticated = 0;
    for (const ServerConnection& c : connections) num_unauthenticated += !c.session.is_authenticated();
    // Drop connections without a hello first: most of the others are about to send their proof.
    for (const bool has_hello : {false, true})
      for (auto at = connections.begin(); at != connections.end() && num_unauthenticated > kMaxUnauthenticated;)
        if (at->session.is_authenticated() || at->session.has_received_hello() != has_hello) {
          ++at;
        } else {
          at = connections.erase(at);
          --num_unauthenticated;
        }
  }

  /// Returns 0 if the connection stays open, otherwise the errno because of which it must be closed.
  int serve_connection(ServerConnection& c) {
    int error = c.has_events ? receive(c) : 0;
    // Check the deadline after receiving: a proof that arrived in time is accepted, even if this process was suspended.
    if (error == 0 && !c.session.is_authenticated() && c.handshake_deadline.expired()) error = ECONNABORTED;
    if (error == 0) c.session.answer_waiting();
    if (c.session.is_authenticated() && !c.is_counted) {
      c.is_counted = true;
      ++connections_per_rank[c.session.rank()];
      // The rank has not ended; it had only lost its connections. Remove the exit that connection_ended() published.
      // bounded: the store is in this process
      if (publish_rank_exits) store.compare_set(key::exited(c.session.rank()), closed_record(), "", Deadline::never());
    }
    if (error == 0 || c.session.is_closed()) {
      const int unsent = send(c);
      if (error == 0) error = unsent;
    }
    if (error == 0 && c.session.is_closed()) error = ECONNABORTED;
    return error;
  }

  static bool feed(ServerConnection& c, std::string_view bytes) {
    try {
      c.session.receive(bytes);
      return true;
    } catch (const std::exception&) {
      return false;  // no memory or no random bytes: close this connection
    }
  }

  int receive(ServerConnection& c) {
    char buffer[65536];
    for (std::size_t capacity = 0; (capacity = std::min(sizeof buffer, c.session.receive_capacity())) > 0;) {
      const ssize_t got = ::recv(c.fd.get(), buffer, capacity, 0);
      if (got > 0 && !feed(c, {buffer, static_cast<std::size_t>(got)})) return ENOMEM;
      if (got > 0) continue;
      if (got == 0) return ECONNRESET;
      if (errno == EAGAIN) return 0;
      if (errno != EINTR) return errno;
    }
    return 0;
  }

  int send(ServerConnection& c) {
    std::string& out = c.session.output();
    while (!out.empty()) {
      const ssize_t sent = ::send(c.fd.get(), out.data(), out.size(), MSG_NOSIGNAL);
      if (sent > 0)
        out.erase(0, static_cast<std::size_t>(sent));
      else if (errno == EAGAIN)
        return 0;
      else if (errno != EINTR)
        return errno;
    }
    return 0;
  }

  void connection_ended(const ServerConnection& c, int error) {
    const auto refusal = c.session.refusal();
    if (refusal != StoreSession::Refusal::kNone && reported_refusals.insert(refusal).second)
      base::log_warning(c.session.refused_peer() + " was rejected by the store at " + to_string(address) +
                        "; further rejections of this kind are not logged");
    if (!c.is_counted) return;
    const int rank = c.session.rank();
    const bool last = --connections_per_rank[rank] == 0;
    if (rank < 0) return;
    if (base::net::is_unreachable(error)) {
      unreachable_ranks.insert(rank);
      if (report_unreachable_at.is_never()) report_unreachable_at = Deadline::in(base::kUnreachableReportDelay);
    } else if (last && publish_rank_exits) {
      // bounded: the store is in this process
      store.compare_set(key::exited(rank), "", closed_record(), Deadline::never());
    }
  }

  void report_unreachable() {
    report_unreachable_at = Deadline::never();
    std::set<std::string> hosts;
    for (const int rank : unreachable_ranks) hosts.insert(find_host_of_rank(store, rank));
    const std::string host_list = base::joined(hosts);
    publish_cause(
        store,
        {.cause = base::Cause::kPeerUnreachable,
         .rank = *unreachable_ranks.begin(),
         .host = hosts.size() == 1 ? host_list : "",
         .gen = credentials.generation,
         .detail = (unreachable_ranks.size() == 1 ? "rank " : "ranks ") + base::joined(unreachable_ranks, ",") +
                   " on " + host_list + " cannot be reached: the host has not answered for " +
                   base::net::host_timeout_text(),
         .hint = "check that the host is up and that the network between it and " + to_string(address) + " works"});
  }

  const Credentials credentials;
  const bool publish_rank_exits;
  const std::uint64_t number = random_number();
  base::Fd listener;
  const base::net::Address address;
  base::Fd wake_fd;
  LocalStore store;
  // Used by the thread only:
  std::map<int, int> connections_per_rank;
  std::list<ServerConnection> connections;
  Deadline accept_again = Deadline::in(std::chrono::seconds(0));
  std::set<int> unreachable_ranks;
  Deadline report_unreachable_at = Deadline::never();
  std::set<StoreSession::Refusal> reported_refusals;
  std::atomic<bool> stop{false};
  std::thread thread;
};

StoreServer::StoreServer(const base::net::Address& address, Credentials credentials, bool publish_rank_exits)
    : impl_(std::make_unique<Impl>(address, std::move(credentials), publish_rank_exits)) {}
StoreServer::~StoreServer() = default;
const base::net::Address& StoreServer::address() const { return impl_->address; }
LocalStore& StoreServer::store() { return impl_->store; }

}  // namespace lockstep::job
