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
#include "lockstep/job/fatal.h"
#include "lockstep/job/join.h"
#include "lockstep/job/store_session.h"

namespace lockstep::job {
namespace {

using base::Deadline;

constexpr std::size_t kMaxStrangers = 64;  // connections that have not been admitted yet
constexpr auto kHelloLimit = std::chrono::seconds(2);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr auto kHostFallsSilent = std::chrono::milliseconds(1500);  // all connections of a host, one after another

struct Connection {
  Connection(base::Fd from, const Credentials& credentials, std::uint64_t server, LocalStore& store)
      : fd(std::move(from)), session(credentials, server, store) {}

  base::Fd fd;
  StoreSession session;
  Deadline admitted_by = Deadline::in(kHelloLimit);
  bool counted = false;  // in ranks
  bool ready = true;     // something has come, or can go
};

std::uint64_t random_number() {
  const Mac bytes = new_nonce();
  std::uint64_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

}  // namespace

struct StoreServer::Impl {
  Impl(const base::Address& where, Credentials expected, bool ends)
      : credentials(std::move(expected)),
        reports_ends(ends),
        listener(base::listen_on(where)),
        address(base::local_address(listener.get())),
        wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake) throw base::SystemError("cannot make an eventfd", errno);
    // Changes by the owner must wake requests that wait; those by the thread itself need it too and come round at once.
    store.on_change([this] { ring(); });
    thread = std::thread([this] { serve(); });
  }
  ~Impl() {
    stop = true;
    ring();
    thread.join();  // bounded: serve() looks at stop after every wake
  }

  void ring() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake.get(), &one, sizeof one);
  }

  void serve() {
    while (!stop) {
      wait_for_events();
      accept_some();
      for (auto at = connections.begin(); at != connections.end();) {
        const int error = serve_one(*at);
        at->ready = false;
        if (error != 0) ended(*at, error);
        at = error == 0 ? std::next(at) : connections.erase(at);
      }
      drop_strangers();
      if (tell_of_silent_at.expired()) tell_of_silent();
    }
  }

  void wait_for_events() {
    // A listener that cannot be accepted from (no descriptors left) would end every poll at once.
    const bool listening = accept_again.expired();
    std::vector<pollfd> entries{{wake.get(), POLLIN, 0}, {listening ? listener.get() : -1, POLLIN, 0}};
    Deadline next = earlier(Deadline::in(std::chrono::minutes(1)), tell_of_silent_at);
    if (!listening) next = earlier(next, accept_again);
    for (Connection& c : connections) {
      entries.push_back({c.fd.get(), static_cast<short>(c.session.out().empty() ? POLLIN : POLLIN | POLLOUT), 0});
      next = earlier(next, c.session.admitted() ? c.session.wait_until() : c.admitted_by);
    }
    ::poll(entries.data(), entries.size(), next.poll_ms());
    auto entry = entries.begin() + 2;
    for (Connection& c : connections) c.ready = (entry++)->revents != 0;
    std::uint64_t count = 0;
    while (::read(wake.get(), &count, sizeof count) > 0) {
    }
  }

  void accept_some() {
    for (std::size_t i = 0; i < kMaxStrangers; ++i) {
      errno = 0;
      base::Fd fd = base::accept_one(listener.get());
      if (!fd) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
          accept_again = Deadline::in(kAcceptPause);
        return;
      }
      connections.emplace_back(std::move(fd), credentials, number, store);
    }
  }

  // The oldest go: those who have something to say have said it, so a crowd of silent ones keeps nobody out.
  void drop_strangers() {
    std::size_t strangers = 0;
    for (const Connection& c : connections) strangers += !c.session.admitted();
    // Of those that have said who they are most are about to prove it.
    for (const bool said_hello : {false, true})
      for (auto at = connections.begin(); at != connections.end() && strangers > kMaxStrangers;)
        if (at->session.admitted() || at->session.has_said_hello() != said_hello) {
          ++at;
        } else {
          at = connections.erase(at);
          --strangers;
        }
  }

  /// 0 while the connection goes on; else why it does not.
  int serve_one(Connection& c) {
    int error = c.ready ? receive(c) : 0;
    // Only now: a proof that came in time is read, even if this process was stopped meanwhile.
    if (error == 0 && !c.session.admitted() && c.admitted_by.expired()) error = ECONNABORTED;
    if (error == 0) c.session.look();
    if (c.session.admitted() && !c.counted) {
      c.counted = true;
      ++ranks[c.session.rank()];
      // It had only lost its connections.
      // bounded: the table is in this process
      if (reports_ends) store.compare_set(key::exited(c.session.rank()), key::kClosed, "", Deadline::never());
    }
    if (error == 0 || c.session.over()) {
      const int unsent = send(c);
      if (error == 0) error = unsent;
    }
    if (error == 0 && c.session.over()) error = ECONNABORTED;
    return error;
  }

  static bool take(Connection& c, std::string_view bytes) {
    try {
      c.session.receive(bytes);
      return true;
    } catch (const std::exception&) {
      return false;  // a system without memory or random bytes: this connection does without
    }
  }

  int receive(Connection& c) {
    char buffer[65536];
    for (std::size_t room = 0; (room = std::min(sizeof buffer, c.session.room())) > 0;) {
      const ssize_t got = ::recv(c.fd.get(), buffer, room, 0);
      if (got > 0 && !take(c, {buffer, static_cast<std::size_t>(got)})) return ENOMEM;
      if (got > 0) continue;
      if (got == 0) return ECONNRESET;
      if (errno == EAGAIN) return 0;
      if (errno != EINTR) return errno;
    }
    return 0;
  }

  int send(Connection& c) {
    std::string& out = c.session.out();
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

  void ended(const Connection& c, int error) {
    const auto refusal = c.session.refusal();
    if (refusal != StoreSession::Refusal::kNone && told.insert(refusal).second)
      base::log_warning(c.session.refused() + " was turned away by the store at " + to_string(address) +
                        "; its like is not reported again");
    if (!c.counted) return;
    const int rank = c.session.rank();
    const bool last = --ranks[rank] == 0;
    if (rank < 0) return;
    if (base::is_unreachable(error)) {
      silent.insert(rank);
      if (tell_of_silent_at.is_never()) tell_of_silent_at = Deadline::in(kHostFallsSilent);
    } else if (last && reports_ends) {
      store.compare_set(key::exited(rank), "", key::kClosed,
                        Deadline::never());  // bounded: the table is in this process
    }
  }

  void tell_of_silent() {
    tell_of_silent_at = Deadline::never();
    std::string who;
    std::set<std::string> hosts;
    for (const int rank : silent) {
      who += (who.empty() ? "" : ",") + std::to_string(rank);
      hosts.insert(host_of(store, rank));
    }
    std::string where;
    for (const std::string& host : hosts) where += (where.empty() ? "" : ", ") + host;
    publish_cause(store, {.cause = base::Cause::kPeerUnreachable,
                          .rank = *silent.begin(),
                          .host = hosts.size() == 1 ? where : "",
                          .gen = credentials.generation,
                          .detail = (silent.size() == 1 ? "rank " : "ranks ") + who + " on " + where +
                                    " cannot be reached: the host has not answered for " +
                                    std::to_string(base::kHostIsSilent.count()) + " s",
                          .hint = "is the host up, and the network between it and " + to_string(address) + "?"});
  }

  const Credentials credentials;
  const bool reports_ends;
  const std::uint64_t number = random_number();
  base::Fd listener;
  const base::Address address;
  base::Fd wake;
  LocalStore store;
  // Touched by the thread only:
  std::map<int, int> ranks;  // how many connections each has
  std::list<Connection> connections;
  Deadline accept_again = Deadline::in(std::chrono::seconds(0));
  std::set<int> silent;  // ranks whose host does not answer
  Deadline tell_of_silent_at = Deadline::never();
  std::set<StoreSession::Refusal> told;
  std::atomic<bool> stop{false};
  std::thread thread;
};

StoreServer::StoreServer(const base::Address& address, Credentials credentials, bool reports_ends)
    : impl_(std::make_unique<Impl>(address, std::move(credentials), reports_ends)) {}
StoreServer::~StoreServer() = default;
const base::Address& StoreServer::address() const { return impl_->address; }
LocalStore& StoreServer::store() { return impl_->store; }

}  // namespace lockstep::job
