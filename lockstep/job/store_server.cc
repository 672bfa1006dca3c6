#include "lockstep/job/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/store_wire.h"

namespace lockstep::job {
namespace {

using base::Deadline;

constexpr std::size_t kMaxStrangers = 64;                       // connections that have not said hello yet
constexpr auto kHelloLimit = std::chrono::seconds(2);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr std::size_t kMaxHello = 8 + 2 + 1 + wire::kMaxJob;

struct Connection {
  base::Fd fd;
  bool greeted = false;
  Deadline hello_by = Deadline::in(kHelloLimit);
  std::string in;
  std::string out;
  std::string waits_for;  // the key of a get that waits
  Deadline wait_until = Deadline::never();
  bool waiting = false;
};

void reply(Connection& connection, wire::Status status, std::string_view value) {
  wire::put(connection.out, static_cast<std::uint32_t>(1 + value.size()));
  wire::put(connection.out, status);
  connection.out.append(value);
}

}  // namespace

struct StoreServer::Impl {
  Impl(const base::Address& where, std::string name)
      : job(std::move(name)), listener(base::listen_on(where)), address(base::local_address(listener.get())),
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
      for (auto at = connections.begin(); at != connections.end();)
        at = serve_one(*at) ? std::next(at) : connections.erase(at);
      drop_strangers();
    }
  }

  void wait_for_events() {
    // A listener that cannot be accepted from (no descriptors left) would end every poll at once.
    const bool listening = accept_again.expired();
    std::vector<pollfd> entries{{wake.get(), POLLIN, 0}, {listening ? listener.get() : -1, POLLIN, 0}};
    Deadline next = Deadline::in(std::chrono::minutes(1));
    if (!listening) next = earlier(next, accept_again);
    for (const Connection& c : connections) {
      entries.push_back({c.fd.get(), static_cast<short>(c.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      if (!c.greeted) next = earlier(next, c.hello_by);
      if (c.waiting) next = earlier(next, c.wait_until);
    }
    ::poll(entries.data(), entries.size(), next.poll_ms());
    std::uint64_t count = 0;
    while (::read(wake.get(), &count, sizeof count) > 0) {
    }
  }

  void accept_some() {
    for (std::size_t i = 0; i < kMaxStrangers; ++i) {
      errno = 0;
      base::Fd fd = base::accept_one(listener.get());
      if (!fd) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) accept_again = Deadline::in(kAcceptPause);
        return;
      }
      connections.emplace_back().fd = std::move(fd);
    }
  }

  // The oldest go: those who have something to say have said it, so a crowd of silent ones keeps nobody out.
  void drop_strangers() {
    std::size_t strangers = 0;
    for (const Connection& c : connections) strangers += !c.greeted;
    for (auto at = connections.begin(); strangers > kMaxStrangers;)
      if (at->greeted) {
        ++at;
      } else {
        at = connections.erase(at);
        --strangers;
      }
  }

  // False: the connection is finished.
  bool serve_one(Connection& c) {
    if (!receive(c)) return false;
    if (!c.greeted && !greet(c)) return false;
    // Only now: a hello that came in time is read, even if this process was stopped meanwhile.
    if (!c.greeted && c.hello_by.expired()) return false;
    answer_waiter(c);
    while (c.greeted && !c.waiting && one_request(c)) {
    }
    if (c.in.size() > wire::kMaxFrame + 4) return false;
    return send(c);
  }

  bool receive(Connection& c) {
    char buffer[65536];
    const std::size_t room = c.greeted ? sizeof buffer : kMaxHello;
    for (;;) {
      const ssize_t got = ::recv(c.fd.get(), buffer, room, 0);
      if (got > 0) {
        c.in.append(buffer, static_cast<std::size_t>(got));
        if (c.in.size() > (c.greeted ? wire::kMaxFrame : kMaxHello)) return c.greeted;
      } else if (got == 0) {
        return false;
      } else if (errno != EINTR) {
        return errno == EAGAIN;
      }
    }
  }

  bool greet(Connection& c) {
    const std::size_t fixed = wire::kMagic.size() + 3;
    if (c.in.compare(0, std::min(c.in.size(), wire::kMagic.size()), wire::kMagic.substr(0, c.in.size())) != 0) {
      if (!std::exchange(warned, true))
        base::log_warning("a connection that is not Lockstep's was dropped from " + to_string(address) + "; more such are not reported");
      return false;
    }
    if (c.in.size() < fixed) return true;
    wire::Reader reader(std::string_view(c.in).substr(wire::kMagic.size()));
    const auto protocol = reader.take<std::uint16_t>();
    const std::size_t length = reader.take<std::uint8_t>();
    if (length > wire::kMaxJob) return false;
    if (c.in.size() < fixed + length) return true;
    const std::string_view theirs = std::string_view(c.in).substr(fixed, length);
    const auto verdict = protocol != wire::kProtocol ? wire::Verdict::kOtherProtocol
                         : theirs != job             ? wire::Verdict::kOtherJob
                                                     : wire::Verdict::kWelcome;
    c.out.append(wire::kMagic);
    wire::put(c.out, wire::kProtocol);
    wire::put(c.out, verdict);
    c.in.erase(0, fixed + length);
    c.greeted = verdict == wire::Verdict::kWelcome;
    if (!c.greeted) send(c);
    return c.greeted;
  }

  void answer_waiter(Connection& c) {
    if (!c.waiting) return;
    if (const auto value = store.find(c.waits_for, Deadline::never()))  // bounded: the table is in this process
      reply(c, wire::Status::kValue, *value);
    else if (c.wait_until.expired())
      reply(c, wire::Status::kNone, {});
    else
      return;
    c.waiting = false;
  }

  // Takes one whole request off the input; false when there is none.
  bool one_request(Connection& c) {
    std::uint32_t size = 0;
    if (c.in.size() < sizeof size) return false;
    std::memcpy(&size, c.in.data(), sizeof size);
    if (size > wire::kMaxFrame) {
      c.in.assign(wire::kMaxFrame + 5, '\0');  // more than a frame: serve_one() drops the connection
      return false;
    }
    if (c.in.size() < sizeof size + size) return false;
    handle(c, std::string_view(c.in).substr(sizeof size, size));
    c.in.erase(0, sizeof size + size);
    return true;
  }

  void handle(Connection& c, std::string_view frame) {
    wire::Reader reader(frame);
    const auto verb = reader.take<wire::Verb>();
    const auto wait_ms = reader.take<std::uint32_t>();
    const std::string_view key = reader.take_text(wire::kMaxKey);
    const std::string_view expected = reader.take_text(wire::kMaxValue);
    const std::string_view value = reader.rest();
    if (!reader.ok() || value.size() > wire::kMaxValue) return reply(c, wire::Status::kRefused, "store: malformed request");
    const Deadline now = Deadline::never();  // bounded: the table is in this process
    try {
      switch (verb) {
        case wire::Verb::kSet: store.set(key, value, now); return reply(c, wire::Status::kValue, {});
        case wire::Verb::kGet:
          c.waits_for = key;
          c.wait_until = Deadline::in(std::chrono::milliseconds(wait_ms));
          c.waiting = true;
          return answer_waiter(c);
        case wire::Verb::kAdd: {
          const std::int64_t amount = base::parse_int_in("store: the amount to add", value, INT64_MIN, INT64_MAX);
          return reply(c, wire::Status::kValue, std::to_string(store.add(key, amount, now)));
        }
        case wire::Verb::kCompareSet: return reply(c, wire::Status::kValue, store.compare_set(key, expected, value, now));
      }
      reply(c, wire::Status::kRefused, "store: unknown verb");
    } catch (const base::UsageError& error) {
      reply(c, wire::Status::kRefused, error.what());
    }
  }

  bool send(Connection& c) {
    while (!c.out.empty()) {
      const ssize_t sent = ::send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
      if (sent > 0)
        c.out.erase(0, static_cast<std::size_t>(sent));
      else if (errno == EAGAIN)
        return true;
      else if (errno != EINTR)
        return false;
    }
    return true;
  }

  const std::string job;
  base::Fd listener;
  const base::Address address;
  base::Fd wake;
  LocalStore store;
  // Touched by the thread only:
  std::list<Connection> connections;
  Deadline accept_again = Deadline::in(std::chrono::seconds(0));
  bool warned = false;
  std::atomic<bool> stop{false};
  std::thread thread;
};

StoreServer::StoreServer(const base::Address& address, std::string job)
    : impl_(std::make_unique<Impl>(address, std::move(job))) {}
StoreServer::~StoreServer() = default;
const base::Address& StoreServer::address() const { return impl_->address; }
LocalStore& StoreServer::store() { return impl_->store; }

}  // namespace lockstep::job
