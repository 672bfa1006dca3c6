#include "lockstep/job/store_client.h"

#include <cerrno>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_wire.h"

namespace lockstep::job {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;

constexpr const char* kGone = "the launcher (or rank 0, which serves the store when there is none) has ended";

[[noreturn]] void lost(const base::Address& address, const std::string& why) {
  throw CommError(Cause::kCoordinatorLost, "store", -1, -1, "the job's store at " + to_string(address) + " is lost: " + why, kGone);
}

[[noreturn]] void lost(const base::Address& address, const base::SystemError& error) {
  if (!base::is_unreachable(error.error_number())) lost(address, error.what());
  throw CommError(Cause::kCoordinatorLost, "store", -1, -1,
                  "the job's store at " + to_string(address) + " cannot be reached: its host has not answered for " +
                      std::to_string(base::kHostIsSilent.count()) + " s",
                  "is that host up, and the network to it?");
}

/// A connection that was admitted.
struct Line {
  base::Fd fd;
  wire::Seal requests, replies;
};

/// Throws unless the server has admitted a rank with this job, generation and protocol.
void check_verdict(const base::Address& address, const Credentials& credentials, wire::Verdict verdict, int generation) {
  const std::string store = "the store at " + to_string(address);
  if (verdict == wire::Verdict::kOtherProtocol)
    throw CommError(Cause::kProtocol, "store", -1, -1,
                    store + " speaks another protocol than " + std::to_string(wire::kProtocol) + ": all ranks and the launcher must be of one Lockstep version");
  if (verdict == wire::Verdict::kOtherJob)
    throw CommError(Cause::kWrongJob, "store", -1, -1, store + " belongs to another job than " + base::quoted(credentials.job, 80),
                    "is the address that of this job, and has an earlier one ended?");
  if (verdict == wire::Verdict::kOtherGeneration)
    throw CommError(Cause::kStaleGen, "store", -1, -1,
                    store + " belongs to start " + std::to_string(generation) + " of this job, and this rank to start " + std::to_string(credentials.generation),
                    "processes of an earlier start are still there");
  if (verdict != wire::Verdict::kWelcome)
    throw CommError(Cause::kAuthFailed, "store", -1, -1, store + " and this rank do not have the same job key",
                    credentials.key.secret() ? "give every rank the same LOCKSTEP_KEY_FILE; ranks of `lockstep run` have theirs from it"
                                             : "this rank has no key: LOCKSTEP_KEY_FILE names a file with one; ranks of `lockstep run` have theirs from it");
}

/// The next `size` bytes, with which a store answers.
std::string hear(const base::Address& address, const base::Fd& fd, std::size_t size, Deadline deadline) {
  std::string bytes(size, '\0');
  const bool answered = base::recv_all(fd.get(), bytes.data(), size, deadline);
  const std::string_view beginning = std::string_view(bytes).substr(0, wire::kMagic.size());
  if (!answered || (size >= wire::kMagic.size() && beginning != wire::kMagic))
    throw CommError(Cause::kProtocol, "store", -1, -1, "what listens at " + to_string(address) + " is not a Lockstep store");
  return bytes;
}

Line enter(const base::Address& address, const Credentials& credentials, int rank, Deadline deadline, bool listens) {
  base::Fd fd = base::dial(address, deadline, listens);
  const std::string hello = wire::hello(credentials, rank, new_nonce());
  base::send_all(fd.get(), hello, deadline);
  // What every version says first, then the rest.
  std::string challenge = hear(address, fd, wire::kVerdictSize, deadline);
  const auto protocol = wire::Reader(std::string_view(challenge).substr(wire::kMagic.size())).take<std::uint16_t>();
  auto verdict = static_cast<wire::Verdict>(challenge.back());
  if (protocol != wire::kProtocol || verdict == wire::Verdict::kOtherProtocol) check_verdict(address, credentials, wire::Verdict::kOtherProtocol, 0);
  challenge.resize(wire::kChallengeSize);
  if (!base::recv_all(fd.get(), challenge.data() + wire::kVerdictSize, wire::kChallengeSize - wire::kVerdictSize, deadline)) lost(address, "it closed the connection");
  wire::Reader reader(challenge);
  const std::string_view said = reader.take_bytes(wire::kChallengeSize - wire::kMac);
  const auto generation = wire::Reader(said.substr(wire::kVerdictSize)).take<std::int32_t>();
  check_verdict(address, credentials, verdict, generation);
  const wire::Handshake agreed = wire::handshake(credentials.key, hello, said);
  // To a server that does not have our key nothing is proved; one that is this job's tells of it.
  const bool ours = equal(agreed.of_server, reader.rest());
  base::send_all(fd.get(), ours ? std::string(bytes_of(agreed.of_client)) : std::string(wire::kMac, '\0'), deadline);
  verdict = ours ? static_cast<wire::Verdict>(hear(address, fd, 1, deadline).front()) : wire::Verdict::kOtherKey;
  check_verdict(address, credentials, verdict, generation);
  return {std::move(fd), wire::Seal(agreed.key, wire::kRequests), wire::Seal(agreed.key, wire::kReplies)};
}

/// Each request has a connection to itself while it lasts: a thread that waits in get() holds up nobody. One that has ended meanwhile is replaced.
class StoreClient final : public Store {
 public:
  StoreClient(base::Address address, Credentials credentials, int rank, Deadline deadline)
      : address_(std::move(address)), credentials_(std::move(credentials)), rank_(rank) {
    try {
      idle_.push_back(enter(address_, credentials_, rank_, deadline, false));
    } catch (const base::SystemError& error) {
      lost(address_, error);
    }
  }

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    ask(wire::Verb::kSet, key, {}, value, 0);
  }
  std::optional<std::string> get(std::string_view key, Deadline deadline) override {
    return ask(wire::Verb::kGet, key, {}, {}, static_cast<std::uint32_t>(deadline.poll_ms(std::chrono::hours(24))));
  }
  std::optional<std::string> find(std::string_view key, Deadline deadline) override {
    return ask(wire::Verb::kGet, key, {}, {}, 0);
  }
  std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) override {
    const auto sum = ask(wire::Verb::kAdd, key, {}, std::to_string(amount), 0);
    return base::parse_int(sum.value_or("0")).value_or(0);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return ask(wire::Verb::kCompareSet, key, expected, desired, 0).value_or("");
  }

 private:
  std::optional<std::string> ask(wire::Verb verb, std::string_view key, std::string_view expected, std::string_view value,
                                 std::uint32_t wait_ms) {
    check_limits(key, value);
    check_limits(key, expected);
    std::string body;
    wire::put(body, verb);
    wire::put(body, wait_ms);
    wire::put_text(body, key);
    wire::put_text(body, expected);
    body += value;
    return exchange(body, verb, wait_ms);
  }

  std::optional<std::string> exchange(const std::string& body, wire::Verb verb, std::uint32_t wait_ms) {
    // A verb that does not wait is answered at once by a store that lives: 10 s, whatever less the caller allows, tells a
    // dead one from a busy machine.
    const Deadline limit = Deadline::in(std::chrono::milliseconds(wait_ms) + std::chrono::seconds(10));
    auto line = idle_line();
    const bool used_before = line.has_value();
    try {
      return answer_on(line ? std::move(*line) : new_line(limit), body, limit);
    } catch (const base::SystemError& error) {
      // A connection may have ended while it was idle. What was asked may have been done: it does not matter but for a sum.
      if (!used_before || verb == wire::Verb::kAdd || base::is_unreachable(error.error_number())) lost(address_, error);
    }
    forget_idle_lines();
    try {
      return answer_on(new_line(limit), body, limit);
    } catch (const base::SystemError& error) {
      lost(address_, error);
    }
  }

  /// Throws SystemError when the connection does not last.
  std::optional<std::string> answer_on(Line line, const std::string& body, Deadline limit) {
    base::send_all(line.fd.get(), line.requests.close(body), limit);
    std::string length(wire::kLength, '\0');
    hear_whole(line, length, limit);
    const std::size_t size = wire::take_length(length).value_or(0);
    if (size == 0) lost(address_, "its reply has no length");
    std::string reply(size + wire::kMac, '\0');
    hear_whole(line, reply, limit);
    const std::string mac = reply.substr(size);
    reply.resize(size);
    if (!line.replies.fits(reply, mac)) lost(address_, "its reply was changed on the way");
    give_back(std::move(line));
    const auto status = static_cast<wire::Status>(reply[0]);
    if (status == wire::Status::kRefused) throw base::UsageError(reply.substr(1));
    if (status == wire::Status::kNone) return std::nullopt;
    return reply.substr(1);
  }

  static void hear_whole(const Line& line, std::string& bytes, Deadline limit) {
    if (!base::recv_all(line.fd.get(), bytes.data(), bytes.size(), limit)) throw base::SystemError("it closed the connection", ECONNRESET);
  }

  Line new_line(Deadline limit) {
    try {
      return enter(address_, credentials_, rank_, earlier(limit, Deadline::in(std::chrono::seconds(5))), true);
    } catch (const base::PeerLost& error) {
      lost(address_, error.what());
    }
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

  const base::Address address_;
  const Credentials credentials_;
  const int rank_;
  std::mutex mutex_;  // guards idle_
  std::vector<Line> idle_;
};

}  // namespace

std::shared_ptr<Store> connect_store(const base::Address& address, const Credentials& credentials, int rank, base::Deadline deadline) {
  if (credentials.job.size() > wire::kMaxJob)
    throw base::UsageError("the job's name has " + std::to_string(credentials.job.size()) + " bytes; allowed are 128");
  return std::make_shared<StoreClient>(address, credentials, rank, deadline);
}

}  // namespace lockstep::job
