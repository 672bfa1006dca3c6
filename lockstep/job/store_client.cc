#include "lockstep/job/store_client.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_protocol.h"

namespace lockstep::job {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;

constexpr int kTries = 5;  // of connections that end before they are admitted
constexpr auto kPause = std::chrono::milliseconds(50);
constexpr std::chrono::milliseconds kAnswers{10000};
constexpr std::chrono::milliseconds kDialsAgain{
    3200};  // the system asks at 0, 1 and 3 s; that a host is silent may have taken 6 s to be seen
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24);  // wait of one request
constexpr const char* kGone = "the launcher (or rank 0, which serves the store when there is none) has ended";

[[noreturn]] void lost(const base::Address& address, const std::string& why) {
  throw CommError(Cause::kCoordinatorLost, "store", -1, -1,
                  "the job's store at " + to_string(address) + " is lost: " + why, kGone);
}

[[noreturn]] void out_of_reach(const base::Address& address) {
  throw base::PeerLost(Cause::kPeerUnreachable, "store", -1, -1,
                       "the job's store at " + to_string(address) +
                           " cannot be reached: its host has not answered for " +
                           std::to_string(base::kHostIsSilent.count()) + " s",
                       "is that host up, and the network to it?");
}

[[noreturn]] void lost(const base::Address& address, const base::SystemError& error) {
  if (error.cause() == Cause::kRankStuck)  // our own deadline
    throw CommError(Cause::kCoordinatorLost, "store", -1, -1,
                    "the job's store at " + to_string(address) + " has not answered for some time, but its host does",
                    "is the launcher stopped, or rank 0, which serves the store when there is none?");
  if (base::is_unreachable(error.error_number())) out_of_reach(address);
  lost(address, error.what());
}

/// A connection that was admitted.
struct Line {
  base::Fd fd;
  wire::Seal requests, replies;
  std::uint64_t server;  // its number
};

/// Throws unless the server has admitted a rank with this job, generation and protocol.
void check_verdict(const base::Address& address, const Credentials& credentials, wire::Verdict verdict,
                   int generation) {
  const std::string store = "the store at " + to_string(address);
  if (verdict == wire::Verdict::kOtherProtocol)
    throw CommError(Cause::kProtocol, "store", -1, -1,
                    store + " speaks another protocol than " + std::to_string(wire::kProtocol) +
                        ": all ranks and the launcher must be of one Lockstep version");
  if (verdict == wire::Verdict::kOtherJob)
    throw CommError(Cause::kWrongJob, "store", -1, -1,
                    store + " belongs to another job than " + base::quoted(credentials.job, 80),
                    "is the address that of this job, and has an earlier one ended?");
  if (verdict == wire::Verdict::kOtherGeneration)
    throw CommError(Cause::kStaleGen, "store", -1, -1,
                    store + " belongs to start " + std::to_string(generation) +
                        " of this job, and this rank to start " + std::to_string(credentials.generation),
                    "processes of an earlier start are still there");
  if (verdict != wire::Verdict::kWelcome)
    throw CommError(Cause::kAuthFailed, "store", -1, -1, store + " and this rank do not have the same job key",
                    credentials.key.secret()
                        ? "give every rank the same LOCKSTEP_KEY_FILE; ranks of `lockstep run` have theirs from it"
                        : "this rank has no key: LOCKSTEP_KEY_FILE names a file with one; ranks of `lockstep run` have "
                          "theirs from it");
}

/// Fills `bytes`. Throws SystemError when the connection does not last.
void hear(const base::Fd& fd, char* bytes, std::size_t size, Deadline deadline) {
  if (!base::recv_all(fd.get(), bytes, size, deadline)) throw base::SystemError("it closed the connection", ECONNRESET);
}

/// On a new connection. Throws SystemError when that ends before the server has answered.
Line enter(const base::Address& address, base::Fd fd, const Credentials& credentials, int rank, Deadline deadline) {
  const std::string hello = wire::hello(credentials, rank, new_nonce());
  base::send_all(fd.get(), hello, deadline);
  // What every version says first, then the rest.
  std::string challenge(wire::kVerdictSize, '\0');
  hear(fd, challenge.data(), challenge.size(), deadline);
  if (!challenge.starts_with(wire::kMagic))
    throw CommError(Cause::kProtocol, "store", -1, -1,
                    "what listens at " + to_string(address) + " is not a Lockstep store");
  const auto protocol = wire::Reader(std::string_view(challenge).substr(wire::kMagic.size())).take<std::uint16_t>();
  auto verdict = static_cast<wire::Verdict>(challenge.back());
  if (protocol != wire::kProtocol || verdict == wire::Verdict::kOtherProtocol)
    check_verdict(address, credentials, wire::Verdict::kOtherProtocol, 0);
  challenge.resize(wire::kChallengeSize);
  hear(fd, challenge.data() + wire::kVerdictSize, wire::kChallengeSize - wire::kVerdictSize, deadline);
  wire::Reader reader(challenge);
  const std::string_view said = reader.take_bytes(wire::kChallengeSize - wire::kMac);
  wire::Reader numbers(said.substr(wire::kVerdictSize));
  const auto generation = numbers.take<std::int32_t>();
  const auto server = numbers.take<std::uint64_t>();
  check_verdict(address, credentials, verdict, generation);
  const wire::Handshake agreed = wire::handshake(credentials.key, hello, said);
  // To a server that does not have our key nothing is proved; one that is this job's tells of it.
  const bool ours = equal(agreed.of_server, reader.rest());
  base::send_all(fd.get(), ours ? std::string(bytes_of(agreed.of_client)) : std::string(wire::kMac, '\0'), deadline);
  char admission = static_cast<char>(wire::Verdict::kOtherKey);
  if (ours) hear(fd, &admission, 1, deadline);
  check_verdict(address, credentials, static_cast<wire::Verdict>(admission), generation);
  return {std::move(fd), wire::Seal(agreed.key, wire::kRequests), wire::Seal(agreed.key, wire::kReplies), server};
}

/// Each request has a connection to itself while it lasts: a thread that waits in get() holds up nobody. One that has
/// ended meanwhile is replaced, as long as the same server is there; once it is not, or cannot be reached, nobody asks
/// again.
class StoreClient final : public Store {
 public:
  StoreClient(base::Address address, Credentials credentials, int rank, Deadline deadline)
      : address_(std::move(address)), credentials_(std::move(credentials)), rank_(rank) {
    try {
      Line first = come_in(deadline, false);
      server_ = first.server;
      // Names are looked up once: a network that is down may have no resolver.
      address_ = base::peer_address(first.fd.get());
      idle_.push_back(std::move(first));
    } catch (const base::SystemError& error) {
      lost(address_, error);
    }
  }

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    ask(wire::Verb::kSet, key, {}, value, now(), deadline);
  }
  std::optional<std::string> get(std::string_view key, Deadline deadline) override {
    return ask(wire::Verb::kGet, key, {}, {}, deadline, deadline);
  }
  std::optional<std::string> find(std::string_view key, Deadline deadline) override {
    return ask(wire::Verb::kGet, key, {}, {}, now(), deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) override {
    const auto sum = ask(wire::Verb::kAdd, key, {}, std::to_string(amount), now(), deadline);
    return base::parse_int(sum.value_or("0")).value_or(0);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return ask(wire::Verb::kCompareSet, key, expected, desired, now(), deadline).value_or("");
  }

 private:
  enum class Gone { kNo, kEnded, kOutOfReach };
  static Deadline now() { return Deadline::in(std::chrono::milliseconds(0)); }

  std::optional<std::string> ask(wire::Verb verb, std::string_view key, std::string_view expected,
                                 std::string_view value, Deadline wait, Deadline allowed) {
    check_limits(key, value);
    check_limits(key, expected);
    if (gone_ == Gone::kEnded) lost(address_, "it was lost before");
    if (gone_ == Gone::kOutOfReach) out_of_reach(address_);
    const auto body = [&] {
      std::string text;
      wire::put(text, verb);
      wire::put(text, verb == wire::Verb::kGet ? static_cast<std::uint32_t>(wait.poll_ms(std::chrono::hours(24))) : 0);
      wire::put_text(text, key);
      wire::put_text(text, expected);
      return text.append(value);
    };
    // A verb that does not wait is answered at once by a store that runs: 10 s, whatever less the caller allows, tells
    // one that stands still from a busy machine.
    const Deadline limit =
        Deadline::in(std::max(std::min(wait.left(), kLongest) + kAnswers, std::min(allowed.left(), kLongest)));
    auto line = idle_line();
    const bool used_before = line.has_value();
    try {
      return answer_on(line ? std::move(*line) : new_line(limit), body(), limit);
    } catch (const base::SystemError& error) {
      // A connection may have ended while it was idle. What was asked may have been done: it does not matter but for a
      // sum.
      if (!used_before || verb == wire::Verb::kAdd || error.cause() == Cause::kRankStuck ||
          base::is_unreachable(error.error_number()))
        give_up(error);
    }
    forget_idle_lines();
    try {
      return answer_on(new_line(limit), body(), limit);
    } catch (const base::SystemError& error) {
      give_up(error);
    }
  }

  [[noreturn]] void give_up(const base::SystemError& error) {
    if (error.cause() != Cause::kRankStuck)
      gone_ = base::is_unreachable(error.error_number()) ? Gone::kOutOfReach : Gone::kEnded;
    lost(address_, error);
  }

  /// Throws SystemError when the connection does not last.
  std::optional<std::string> answer_on(Line line, const std::string& body, Deadline limit) {
    base::send_all(line.fd.get(), line.requests.close(body), limit);
    std::string length(wire::kLength, '\0');
    hear(line.fd, length.data(), length.size(), limit);
    const std::size_t size = wire::take_length(length).value_or(0);
    if (size == 0) lost(address_, "its reply has no length");
    std::string reply(size + wire::kMac, '\0');
    hear(line.fd, reply.data(), reply.size(), limit);
    const std::string mac = reply.substr(size);
    reply.resize(size);
    if (!line.replies.fits(reply, mac)) lost(address_, "its reply was changed on the way");
    give_back(std::move(line));
    const auto status = static_cast<wire::Status>(reply[0]);
    if (status == wire::Status::kRefused) throw base::UsageError(reply.substr(1));
    if (status == wire::Status::kNone) return std::nullopt;
    return reply.substr(1);
  }

  /// Throws PeerLost, and SystemError when a host that listened before does not answer.
  base::Fd dial(Deadline deadline, bool listens) {
    try {
      return base::dial(address_, deadline, listens);
    } catch (const base::PeerLost&) {
      if (listens && deadline.expired()) throw base::SystemError("connect", ETIMEDOUT, Cause::kPeerUnreachable);
      throw;
    }
  }

  /// An admitted connection. A server that is crowded by strangers may close one that has not been admitted yet: it is
  /// asked again. Throws SystemError when the server does not answer.
  Line come_in(Deadline deadline, bool listens) {
    for (int left = kTries;; --left) {
      base::Fd fd = dial(listens ? earlier(deadline, Deadline::in(kDialsAgain)) : deadline, listens);
      try {
        return enter(address_, std::move(fd), credentials_, rank_, deadline);
      } catch (const base::SystemError& error) {
        if (left <= 1 || deadline.expired() || error.error_number() != ECONNRESET) throw;
      }
      std::this_thread::sleep_for(std::min(kPause, deadline.left()));
    }
  }

  /// One more to the same server.
  Line new_line(Deadline limit) {
    std::string why;
    try {
      Line line = come_in(limit, true);
      if (line.server == server_) return line;
      why = "another one has taken its place";
    } catch (const base::SystemError& error) {
      give_up(error);
    } catch (const base::Error& error) {
      why = error.what();
    }
    gone_ = Gone::kEnded;
    lost(address_, why);
  }

  std::optional<Line> idle_line() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::nullopt;
    Line line = std::move(idle_.back());
    idle_.pop_back();
    return line;
  }

  void forget_idle_lines() {
    const std::lock_guard lock(mutex_);
    idle_.clear();
  }

  void give_back(Line line) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(line));
  }

  base::Address address_;
  const Credentials credentials_;
  const int rank_;
  std::uint64_t server_ = 0;  // the number of the one that was found first
  std::atomic<Gone> gone_{Gone::kNo};
  std::mutex mutex_;  // guards idle_
  std::vector<Line> idle_;
};

}  // namespace

std::shared_ptr<Store> connect_store(const base::Address& address, const Credentials& credentials, int rank,
                                     base::Deadline deadline) {
  if (credentials.job.size() > wire::kMaxJob)
    throw base::UsageError("the job's name has " + std::to_string(credentials.job.size()) + " bytes; allowed are 128");
  return std::make_shared<StoreClient>(address, credentials, rank, deadline);
}

}  // namespace lockstep::job
