#include "lockstep/job/store_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
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

constexpr std::size_t kMaxAccepts = 64;  // before the connections are served
constexpr auto kHandshakeTimeout = std::chrono::seconds(2);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

struct ServerConnection {
  ServerConnection(base::Fd from, const Credentials& credentials, std::uint64_t server, LocalStore& store)
      : fd(std::move(from)), session(credentials, server, store) {}

  base::Fd fd;
  StoreSession session;
  /// When it must be served even without an event.
  Deadline served_by() const { return session.is_authenticated() ? session.wait_until() : handshake_deadline; }

  Deadline handshake_deadline = Deadline::in(kHandshakeTimeout);
  bool is_counted = false;  // in connections_per_rank
  bool has_events = true;   // readable, writable or closed
  bool is_due = false;      // in Impl::due
  bool is_member = false;   // in Impl::members
  std::list<ServerConnection>::iterator position{};
  // As registered, see Impl::update_registrations():
  std::uint32_t epoll_events = 0;
  std::string key;
  Deadline timer = Deadline::never();
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
  Impl(const base::net::Address& where, Credentials expected, int ranks, bool reports)
      : credentials(std::move(expected)),
        max_newcomers(max_unauthenticated(ranks)),
        publish_rank_exits(reports),
        listener(base::net::listen_on(where)),
        address(base::net::local_address(listener.get())),
        wake_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        epoll_fd(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!wake_fd || !epoll_fd || !set_events(wake_fd, EPOLL_CTL_ADD, EPOLLIN, nullptr))
      throw base::SystemError("cannot create an eventfd and an epoll instance", errno);
    // Every change wakes the thread, because it may answer a waiting request. This includes changes by the thread
    // itself, which cause one more iteration.
    store.on_change([this](std::string_view key) {
      {
        const std::lock_guard lock(changed_mutex);
        changed_keys.emplace_back(key);
      }
      wake_thread();
    });
    thread = base::start_thread([this] { serve(); });
  }
  ~Impl() {
    stop = true;
    wake_thread();
    thread.join();  // bounded: serve() checks `stop` after every wake-up
  }

  void wake_thread() { ::eventfd_write(wake_fd.get(), 1); }

  /// Each iteration serves the connections that have something to do, so that its cost does not grow with the others: a
  /// job of 1024 hosts has more than 8000.
  void serve() {
    while (!stop) {
      wait_for_events();
      accept_pending();
      find_due();
      for (ServerConnection* c : due) {
        c->is_due = false;
        const int error = serve_connection(*c);
        c->has_events = false;
        if (error != 0) connection_ended(*c, error);
        if (error != 0 || !update_registrations(*c)) remove(*c);
      }
      due.clear();
      drop_unauthenticated();
      if (report_unreachable_at.expired()) report_unreachable();
    }
  }

  bool set_events(const base::Fd& fd, int operation, std::uint32_t events, ServerConnection* c) const {
    epoll_event event{.events = events, .data = {.ptr = c}};
    return ::epoll_ctl(epoll_fd.get(), operation, fd.get(), &event) == 0;
  }

  void wait_for_events() {
    // While accept() fails because no descriptors are left, do not wait for the listener: every wait would end at once.
    const bool listens = accept_again.expired();
    if (listens != is_listening && set_events(listener, listens ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, EPOLLIN, nullptr))
      is_listening = listens;
    Deadline next = earlier(Deadline::in(std::chrono::minutes(1)), report_unreachable_at);
    if (!listens) next = earlier(next, accept_again);
    if (!timers.empty()) next = earlier(next, Deadline::at(timers.begin()->first));
    // Room for all: a connection whose proof has arrived must not be dropped as one of too many unauthenticated ones.
    ready_events.resize(2 + newcomers.size() + members.size());
    const int count =
        ::epoll_wait(epoll_fd.get(), ready_events.data(), static_cast<int>(ready_events.size()), next.poll_ms());
    for (int i = 0; i < count; ++i)
      if (auto* c = static_cast<ServerConnection*>(ready_events[static_cast<std::size_t>(i)].data.ptr)) {
        c->has_events = true;
        add_due(*c);
      }
    std::uint64_t wakes = 0;
    while (::read(wake_fd.get(), &wakes, sizeof wakes) > 0) {
    }
  }

  void add_due(ServerConnection& c) {
    if (!std::exchange(c.is_due, true)) due.push_back(&c);
  }

  void accept_pending() {
    for (std::size_t i = 0; i < kMaxAccepts; ++i) {
      errno = 0;
      base::Fd fd = base::net::try_accept(listener.get());
      if (!fd) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
          accept_again = Deadline::in(kAcceptPause);
        return;
      }
      newcomers.emplace_back(std::move(fd), credentials, number, store);
      newcomers.back().position = std::prev(newcomers.end());
      add_due(newcomers.back());
    }
  }

  /// Adds the connections that wait for a key that has changed, or whose time has come.
  void find_due() {
    std::vector<std::string> changed;
    {
      const std::lock_guard lock(changed_mutex);
      changed.swap(changed_keys);
    }
    for (const std::string& key : changed)
      for (auto at = waiting.lower_bound({key, nullptr}); at != waiting.end() && at->first == key; ++at)
        add_due(*at->second);
    for (auto at = timers.begin(); at != timers.end() && Deadline::at(at->first).expired(); ++at) add_due(*at->second);
  }

  /// Registers what the connection waits for, where that has changed: events, a key, a time. Moves it behind the
  /// unauthenticated ones when it is authenticated. Returns false if the kernel has no memory for that.
  bool update_registrations(ServerConnection& c) {
    const std::uint32_t events = c.session.output().empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
    if (events != c.epoll_events) {
      if (!set_events(c.fd, c.epoll_events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, events, &c)) return false;
      c.epoll_events = events;
    }
    if (const std::string_view key = c.session.waiting_key(); key != c.key) {
      waiting.erase({c.key, &c});
      c.key = key;
      if (!key.empty()) waiting.insert({c.key, &c});
    }
    if (const Deadline by = c.served_by(); by.when() != c.timer.when()) {
      timers.erase({c.timer.when(), &c});
      c.timer = by;
      if (!by.is_never()) timers.insert({by.when(), &c});
    }
    if (c.session.is_authenticated() && !std::exchange(c.is_member, true))
      members.splice(members.end(), newcomers, c.position);
    return true;
  }

  void remove(ServerConnection& c) {
    waiting.erase({c.key, &c});
    timers.erase({c.timer.when(), &c});
    if (c.epoll_events != 0) set_events(c.fd, EPOLL_CTL_DEL, 0, nullptr);  // a child of a fork() may keep it open
    (c.is_member ? members : newcomers).erase(c.position);
  }

  // Drops the oldest unauthenticated connections above the limit. Ranks send their hello at once, so many silent
  // connections do not keep them out.
  void drop_unauthenticated() {
    // Drop connections without a hello first: most of the others are about to send their proof.
    for (const bool has_hello : {false, true})
      for (auto at = newcomers.begin(); at != newcomers.end() && newcomers.size() > max_newcomers;)
        if (ServerConnection& c = *at++; c.session.has_received_hello() == has_hello) remove(c);
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
  const std::size_t max_newcomers;
  const bool publish_rank_exits;
  const std::uint64_t number = random_number();
  base::Fd listener;
  const base::net::Address address;
  base::Fd wake_fd;
  base::Fd epoll_fd;
  std::mutex changed_mutex;  // guards changed_keys
  std::vector<std::string> changed_keys;
  LocalStore store;
  // Used by the thread only:
  std::map<int, int> connections_per_rank;
  std::list<ServerConnection> newcomers, members;  // not authenticated, the oldest first; authenticated
  std::vector<epoll_event> ready_events;
  std::vector<ServerConnection*> due;                           // to be served in this iteration
  std::set<std::pair<std::string, ServerConnection*>> waiting;  // by the key
  std::set<std::pair<Deadline::Clock::time_point, ServerConnection*>> timers;
  bool is_listening = false;
  Deadline accept_again = Deadline::in(std::chrono::seconds(0));
  std::set<int> unreachable_ranks;
  Deadline report_unreachable_at = Deadline::never();
  std::set<StoreSession::Refusal> reported_refusals;
  std::atomic<bool> stop{false};
  std::thread thread;
};

StoreServer::StoreServer(const base::net::Address& address, Credentials credentials, int ranks, bool publish_rank_exits)
    : impl_(std::make_unique<Impl>(address, std::move(credentials), ranks, publish_rank_exits)) {}
StoreServer::~StoreServer() = default;
const base::net::Address& StoreServer::address() const { return impl_->address; }
LocalStore& StoreServer::store() { return impl_->store; }

}  // namespace lockstep::job
