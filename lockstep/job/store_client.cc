#include "lockstep/job/store_client.h"

#include <mutex>
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

[[noreturn]] void lost(const base::Address& address, const std::string& why) {
  throw CommError(Cause::kCoordinatorLost, "store", -1, -1, "the job's store at " + to_string(address) + " is lost: " + why,
                  "the launcher (or rank 0, which serves the store when there is none) has ended");
}

base::Fd dial_and_greet(const base::Address& address, const std::string& job, Deadline deadline) {
  base::Fd fd = base::dial(address, deadline);
  std::string hello(wire::kMagic);
  wire::put(hello, wire::kProtocol);
  wire::put(hello, static_cast<std::uint8_t>(job.size()));
  hello += job;
  char welcome[wire::kWelcomeSize];
  bool answered = false;
  try {
    base::send_all(fd.get(), hello, deadline);
    answered = base::recv_all(fd.get(), welcome, sizeof welcome, deadline);
  } catch (const base::SystemError& error) {
    lost(address, error.what());
  }
  wire::Reader reader({welcome, sizeof welcome});
  if (!answered || std::string_view(welcome, wire::kMagic.size()) != wire::kMagic)
    throw CommError(Cause::kProtocol, "store", -1, -1, "what listens at " + to_string(address) + " is not a Lockstep store");
  const auto verdict = static_cast<wire::Verdict>(welcome[sizeof welcome - 1]);
  if (verdict == wire::Verdict::kOtherProtocol)
    throw CommError(Cause::kProtocol, "store", -1, -1,
                    "the store at " + to_string(address) + " speaks another protocol than " +
                        std::to_string(wire::kProtocol) + ": all ranks and the launcher must be of one Lockstep version");
  if (verdict != wire::Verdict::kWelcome)
    throw CommError(Cause::kBadArg, "store", -1, -1,
                    "the store at " + to_string(address) + " belongs to another job than " + base::quoted(job, 80));
  return fd;
}

/// Each request has a connection to itself while it lasts: a thread that waits in get() holds up nobody.
class StoreClient final : public Store {
 public:
  StoreClient(base::Address address, std::string job, Deadline deadline)
      : address_(std::move(address)), job_(std::move(job)) {
    idle_.push_back(dial_and_greet(address_, job_, deadline));
  }

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    ask(wire::Verb::kSet, key, {}, value, 0, deadline);
  }
  std::optional<std::string> get(std::string_view key, Deadline deadline) override {
    return ask(wire::Verb::kGet, key, {}, {}, static_cast<std::uint32_t>(deadline.poll_ms(std::chrono::hours(24))), deadline);
  }
  std::optional<std::string> find(std::string_view key, Deadline deadline) override {
    return ask(wire::Verb::kGet, key, {}, {}, 0, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) override {
    const auto sum = ask(wire::Verb::kAdd, key, {}, std::to_string(amount), 0, deadline);
    return base::parse_int(sum.value_or("0")).value_or(0);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return ask(wire::Verb::kCompareSet, key, expected, desired, 0, deadline).value_or("");
  }

 private:
  std::optional<std::string> ask(wire::Verb verb, std::string_view key, std::string_view expected, std::string_view value,
                                 std::uint32_t wait_ms, Deadline deadline) {
    check_limits(key, value);
    check_limits(key, expected);
    std::string frame(4, '\0');
    wire::put(frame, verb);
    wire::put(frame, wait_ms);
    wire::put_text(frame, key);
    wire::put_text(frame, expected);
    frame += value;
    const auto length = static_cast<std::uint32_t>(frame.size() - 4);
    std::memcpy(frame.data(), &length, 4);
    return exchange(frame, wait_ms, deadline);
  }

  std::optional<std::string> exchange(const std::string& frame, std::uint32_t wait_ms, Deadline deadline) {
    // A verb that does not wait is answered at once by a store that lives: 10 s, whatever less the caller allows, tells a
    // dead one from a busy machine.
    const Deadline limit = Deadline::in(std::chrono::milliseconds(wait_ms) + std::chrono::seconds(10));
    std::string reply;
    base::Fd fd = take_connection(limit);
    try {
      base::send_all(fd.get(), frame, limit);
      std::uint32_t size = 0;
      if (!base::recv_all(fd.get(), &size, sizeof size, limit)) lost(address_, "it closed the connection");
      if (size == 0 || size > wire::kMaxFrame) lost(address_, "it sent a reply of " + std::to_string(size) + " bytes");
      reply.resize(size);
      if (!base::recv_all(fd.get(), reply.data(), size, limit)) lost(address_, "it closed the connection");
    } catch (const base::SystemError& error) {
      lost(address_, error.what());
    }
    give_back(std::move(fd));
    const auto status = static_cast<wire::Status>(reply[0]);
    if (status == wire::Status::kRefused) throw base::UsageError(reply.substr(1));
    if (status == wire::Status::kNone) return std::nullopt;
    return reply.substr(1);
  }

  base::Fd take_connection(Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        base::Fd fd = std::move(idle_.back());
        idle_.pop_back();
        return fd;
      }
    }
    return dial_and_greet(address_, job_, earlier(deadline, Deadline::in(std::chrono::seconds(5))));
  }

  void give_back(base::Fd fd) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(fd));
  }

  const base::Address address_;
  const std::string job_;
  std::mutex mutex_;  // guards idle_
  std::vector<base::Fd> idle_;
};

}  // namespace

std::shared_ptr<Store> connect_store(const base::Address& address, const std::string& job, base::Deadline deadline) {
  if (job.size() > wire::kMaxJob)
    throw base::UsageError("the job's name has " + std::to_string(job.size()) + " bytes; allowed are 128");
  return std::make_shared<StoreClient>(address, job, deadline);
}

}  // namespace lockstep::job
