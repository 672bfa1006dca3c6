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
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_protocol.h"

namespace lockstep::job {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;

constexpr int kMaxAttempts = 5;  // to connect and authenticate
constexpr auto kRetryPause = std::chrono::milliseconds(50);
constexpr std::chrono::milliseconds kReplyTimeout{10000};
constexpr std::chrono::milliseconds kMaxWait = std::chrono::hours(24);  // for one request
constexpr const char* kStoreGoneHint =
    "check why the launcher ended, or rank 0, which serves the store if there is no launcher";

/// A host is given the same time to accept a further connection as to answer on one that exists.
std::chrono::milliseconds reconnect_timeout() { return base::net::host_timeout() + base::kHostTimeoutMargin; }

[[noreturn]] void throw_lost(const base::net::Address& address, const std::string& why) {
  throw CommError(Cause::kCoordinatorLost, "store", -1, -1,
                  "the connection to the job's store at " + to_string(address) + " is lost: " + why, kStoreGoneHint);
}

[[noreturn]] void throw_unreachable(const base::net::Address& address) {
  throw base::PeerLostError(Cause::kPeerUnreachable, "store", -1, -1,
                            "the job's store at " + to_string(address) +
                                " cannot be reached: its host has not answered for " + base::net::host_timeout_text(),
                            "check that this host is up and that the network to it works");
}

[[noreturn]] void throw_lost(const base::net::Address& address, const base::SystemError& error) {
  if (error.cause() == Cause::kRankStuck)  // the deadline of this client
    throw CommError(Cause::kCoordinatorLost, "store", -1, -1,
                    "the job's store at " + to_string(address) + " does not respond, but its host does",
                    "check whether the launcher is stopped, or rank 0, which serves the store if there is no launcher");
  if (base::net::is_unreachable(error.error_number())) throw_unreachable(address);
  throw_lost(address, error.what());
}

struct ClientConnection {
  base::Fd fd;
  store_protocol::FrameAuthenticator requests, replies;
  std::uint64_t server;  // the server's random number
};

/// Throws unless `result` accepts this client's protocol, job, generation and key. `generation` is the server's.
void check_handshake(const base::net::Address& address, const Credentials& credentials,
                     store_protocol::HandshakeResult result, int generation) {
  const std::string store = "the store at " + to_string(address);
  if (result == store_protocol::HandshakeResult::kOtherProtocol)
    throw CommError(Cause::kProtocol, "store", -1, -1,
                    store + " does not use protocol " + std::to_string(store_protocol::kProtocol),
                    "use the same version of Lockstep for all ranks and the launcher");
  if (result == store_protocol::HandshakeResult::kOtherJob)
    throw CommError(Cause::kWrongJob, "store", -1, -1,
                    store + " belongs to a job other than " + base::quoted(credentials.job, 80),
                    "check the address, and that an earlier job at this address has ended");
  if (result == store_protocol::HandshakeResult::kOtherGeneration)
    throw CommError(Cause::kStaleGen, "store", -1, -1,
                    store + " belongs to generation " + std::to_string(generation) +
                        " of this job, but this rank belongs to generation " + std::to_string(credentials.generation),
                    "stop the processes that remain from an earlier start");
  if (result != store_protocol::HandshakeResult::kAccepted)
    throw CommError(
        Cause::kAuthFailed, "store", -1, -1, store + " and this rank have different job keys",
        credentials.key.is_set()
            ? "set the same LOCKSTEP_KEY_FILE on every rank, or start them with `lockstep run`, which passes a key to "
              "them"
            : "this rank has no key: set LOCKSTEP_KEY_FILE to the job's key file, or start the ranks with `lockstep "
              "run`, which passes a key to them");
}

/// Receives exactly `size` bytes. Throws SystemError if the connection ends.
void receive_all(const base::Fd& fd, char* bytes, std::size_t size, Deadline deadline) {
  if (!base::net::recv_all(fd.get(), bytes, size, deadline))
    throw base::SystemError("the store closed the connection", ECONNRESET);
}

/// Authenticates a new connection. Throws SystemError if the connection ends before the server has replied.
ClientConnection perform_handshake(const base::net::Address& address, base::Fd fd, const Credentials& credentials,
                                   int rank, Deadline deadline) {
  const std::string hello = store_protocol::make_hello(credentials, rank, random_nonce());
  base::net::send_all(fd.get(), hello, deadline);
  // Receive the prefix that is common to all protocol versions, then the rest.
  std::string challenge(store_protocol::kChallengePrefixBytes, '\0');
  receive_all(fd, challenge.data(), challenge.size(), deadline);
  if (!challenge.starts_with(store_protocol::kMagic))
    throw CommError(Cause::kProtocol, "store", -1, -1,
                    "the process that listens at " + to_string(address) + " is not a Lockstep store");
  base::ByteReader prefix(challenge, store_protocol::kSubject);
  prefix.bytes(store_protocol::kMagic.size());
  const auto protocol = prefix.number<std::uint16_t>();
  const auto result = static_cast<store_protocol::HandshakeResult>(challenge.back());
  if (protocol != store_protocol::kProtocol || result == store_protocol::HandshakeResult::kOtherProtocol)
    check_handshake(address, credentials, store_protocol::HandshakeResult::kOtherProtocol, 0);
  challenge.resize(store_protocol::kChallengeBytes);
  receive_all(fd, challenge.data() + store_protocol::kChallengePrefixBytes,
              store_protocol::kChallengeBytes - store_protocol::kChallengePrefixBytes, deadline);
  base::ByteReader reader(challenge, store_protocol::kSubject);
  const std::string_view challenge_body = reader.bytes(store_protocol::kChallengeBytes - store_protocol::kMacBytes);
  base::ByteReader numbers(challenge_body.substr(store_protocol::kChallengePrefixBytes), store_protocol::kSubject);
  const auto generation = numbers.number<std::int32_t>();
  const auto server = numbers.number<std::uint64_t>();
  check_handshake(address, credentials, result, generation);
  const store_protocol::Handshake derived = store_protocol::derive_handshake(credentials.key, hello, challenge_body);
  // If the server has another key, send zeros instead of a proof, so that the server logs the rejection.
  const bool is_authentic = equal_constant_time(derived.server_proof, reader.remaining());
  base::net::send_all(
      fd.get(),
      is_authentic ? std::string(mac_bytes(derived.client_proof)) : std::string(store_protocol::kMacBytes, '\0'),
      deadline);
  char admission = static_cast<char>(store_protocol::HandshakeResult::kOtherKey);
  if (is_authentic) receive_all(fd, &admission, 1, deadline);
  check_handshake(address, credentials, static_cast<store_protocol::HandshakeResult>(admission), generation);
  return {std::move(fd), store_protocol::FrameAuthenticator(derived.key, store_protocol::kRequestDirection),
          store_protocol::FrameAuthenticator(derived.key, store_protocol::kReplyDirection), server};
}

/// A client of one server, with a pool of connections. Each request uses one connection exclusively, so a thread that
/// waits in get() does not delay other threads. A connection that has ended is replaced as long as the same server is
/// reachable. Once the server is lost, every request fails at once.
class StoreClient final : public Store {
 public:
  StoreClient(base::net::Address address, Credentials credentials, int rank, Deadline deadline)
      : address_(std::move(address)), credentials_(std::move(credentials)), rank_(rank) {
    try {
      ClientConnection first = connect_and_handshake(deadline, deadline, false);
      server_ = first.server;
      // Resolve the name only once: the resolver may be unreachable while the network is down.
      address_ = base::net::peer_address(first.fd.get());
      idle_.push_back(std::move(first));
    } catch (const base::SystemError& error) {
      throw_lost(address_, error);
    }
  }

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    request(store_protocol::StoreOperation::kSet, key, {}, value, now(), deadline);
  }
  std::optional<std::string> get(std::string_view key, Deadline deadline) override {
    return request(store_protocol::StoreOperation::kGet, key, {}, {}, deadline, deadline);
  }
  std::optional<std::string> find(std::string_view key, Deadline deadline) override {
    return request(store_protocol::StoreOperation::kGet, key, {}, {}, now(), deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) override {
    const auto sum = request(store_protocol::StoreOperation::kAdd, key, {}, std::to_string(amount), now(), deadline);
    return base::parse_int(sum.value_or("0")).value_or(0);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return request(store_protocol::StoreOperation::kCompareSet, key, expected, desired, now(), deadline).value_or("");
  }

 private:
  enum class StoreLoss { kNone, kEnded, kUnreachable };
  static Deadline now() { return Deadline::in(std::chrono::milliseconds(0)); }

  std::optional<std::string> request(store_protocol::StoreOperation operation, std::string_view key,
                                     std::string_view expected, std::string_view value, Deadline wait,
                                     Deadline allowed) {
    check_limits(key, value);
    check_limits(key, expected);
    if (loss_ == StoreLoss::kEnded) throw_lost(address_, "an earlier request failed");
    if (loss_ == StoreLoss::kUnreachable) throw_unreachable(address_);
    const auto body = [&] {
      std::string text;
      base::put_number(text, operation);
      base::put_number(text, operation == store_protocol::StoreOperation::kGet
                                 ? static_cast<std::uint32_t>(wait.poll_ms(std::chrono::hours(24)))
                                 : 0);
      base::put_text(text, key);
      base::put_text(text, expected);
      return text.append(value);
    };
    // A running store replies at once to a request that does not wait. Allow at least 10 s, even if the caller allows
    // less, so that a busy machine is not taken for a suspended store.
    const Deadline limit = Deadline::in(
        std::max(std::min(wait.remaining(), kMaxWait) + kReplyTimeout, std::min(allowed.remaining(), kMaxWait)));
    const Deadline reconnect = Deadline::in(reconnect_timeout());
    auto connection = take_idle_connection();
    const bool used_before = connection.has_value();
    try {
      return exchange_on(connection ? std::move(*connection) : new_connection(limit, reconnect), body(), limit);
    } catch (const base::SystemError& error) {
      // The connection may have ended while it was idle. The server may have executed the request; repeating it is
      // harmless except for kAdd.
      if (!used_before || operation == store_protocol::StoreOperation::kAdd || error.cause() == Cause::kRankStuck ||
          base::net::is_unreachable(error.error_number()))
        throw_and_mark_lost(error);
    }
    drop_idle_connections();
    try {
      // The server's host may have given this one up because nothing reaches it, which a new connection would wait for
      // as long again.
      return exchange_on(new_connection(limit, later(reconnect, Deadline::in(base::kReconnectGrace))), body(), limit);
    } catch (const base::SystemError& error) {
      throw_and_mark_lost(error);
    }
  }

  [[noreturn]] void throw_and_mark_lost(const base::SystemError& error) {
    if (error.cause() != Cause::kRankStuck)
      loss_ = base::net::is_unreachable(error.error_number()) ? StoreLoss::kUnreachable : StoreLoss::kEnded;
    throw_lost(address_, error);
  }

  /// Sends one request and returns the reply. Throws SystemError if the connection ends.
  std::optional<std::string> exchange_on(ClientConnection connection, const std::string& body, Deadline limit) {
    const std::string frame = connection.requests.make_frame(body);
    base::net::send_all(connection.fd.get(), frame, limit);
    std::string length(store_protocol::kLengthBytes, '\0');
    receive_all(connection.fd, length.data(), length.size(), limit);
    const std::size_t size = store_protocol::parse_length(length).value_or(0);
    if (size == 0) throw_lost(address_, "its reply has an invalid length");
    std::string reply(size + store_protocol::kMacBytes, '\0');
    receive_all(connection.fd, reply.data(), reply.size(), limit);
    base::telemetry::RankPage::this_process().store_bytes.fetch_add(frame.size() + length.size() + reply.size(),
                                                                    std::memory_order_relaxed);
    const std::string mac = reply.substr(size);
    reply.resize(size);
    if (!connection.replies.verify(reply, mac)) throw_lost(address_, "its reply was corrupted in transit");
    return_connection(std::move(connection));
    const auto status = static_cast<store_protocol::ReplyStatus>(reply[0]);
    if (status == store_protocol::ReplyStatus::kRefused) throw base::UsageError(reply.substr(1));
    if (status == store_protocol::ReplyStatus::kNone) return std::nullopt;
    return reply.substr(1);
  }

  /// Throws PeerLostError. With `refusal_is_final`, which means that the server has listened there before, throws
  /// SystemError (ETIMEDOUT) at the deadline.
  base::Fd connect_to(Deadline deadline, bool refusal_is_final) {
    try {
      return base::net::connect_to(address_, deadline, refusal_is_final);
    } catch (const base::PeerLostError&) {
      if (refusal_is_final && deadline.expired())
        throw base::SystemError("connect", ETIMEDOUT, Cause::kPeerUnreachable);
      throw;
    }
  }

  /// Returns an authenticated connection. Retries if the server closes the connection during the handshake, which
  /// happens when many unauthenticated clients connect. Throws SystemError if the server does not answer.
  ClientConnection connect_and_handshake(Deadline connect, Deadline deadline, bool refusal_is_final) {
    for (int attempts_left = kMaxAttempts;; --attempts_left) {
      base::Fd fd = connect_to(earlier(connect, deadline), refusal_is_final);
      try {
        return perform_handshake(address_, std::move(fd), credentials_, rank_, deadline);
      } catch (const base::SystemError& error) {
        if (attempts_left <= 1 || deadline.expired() || error.error_number() != ECONNRESET) throw;
      }
      std::this_thread::sleep_for(std::min(kRetryPause, deadline.remaining()));
    }
  }

  /// Returns another connection to the same server. `connect` bounds the wait for its host.
  ClientConnection new_connection(Deadline limit, Deadline connect) {
    std::string why;
    try {
      ClientConnection connection = connect_and_handshake(connect, limit, true);
      if (connection.server == server_) return connection;
      why = "another store has replaced it";
    } catch (const base::SystemError& error) {
      throw_and_mark_lost(error);
    } catch (const base::Error& error) {
      why = error.what();
    }
    loss_ = StoreLoss::kEnded;
    throw_lost(address_, why);
  }

  std::optional<ClientConnection> take_idle_connection() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::nullopt;
    ClientConnection connection = std::move(idle_.back());
    idle_.pop_back();
    return connection;
  }

  void drop_idle_connections() {
    const std::lock_guard lock(mutex_);
    idle_.clear();
  }

  void return_connection(ClientConnection connection) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(connection));
  }

  base::net::Address address_;
  const Credentials credentials_;
  const int rank_;
  std::uint64_t server_ = 0;  // the random number of the server of the first connection
  std::atomic<StoreLoss> loss_{StoreLoss::kNone};
  std::mutex mutex_;  // guards idle_
  std::vector<ClientConnection> idle_;
};

}  // namespace

std::shared_ptr<Store> connect_store(const base::net::Address& address, const Credentials& credentials, int rank,
                                     base::Deadline deadline) {
  if (credentials.job.size() > store_protocol::kMaxJobNameBytes)
    throw base::UsageError("the job's name has " + std::to_string(credentials.job.size()) +
                           " bytes; expected at most 128");
  return std::make_shared<StoreClient>(address, credentials, rank, deadline);
}

}  // namespace lockstep::job
