#include "lockstep/job/store_session.h"

#include <algorithm>
#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

using base::Deadline;

constexpr const char* kStranger = "a connection that is not Lockstep's";
constexpr std::size_t kPiece = 65536;
constexpr std::size_t kMaxInput = wire::kMaxFrame + kPiece;  // a frame, and what came with it

}  // namespace

std::size_t StoreSession::room() const {
  if (state_ == State::kOver) return 0;
  const std::size_t most = admitted() ? kMaxInput : wire::kMaxBefore;
  return std::min(kPiece, most - std::min(most, in_.size()));
}

void StoreSession::receive(std::string_view bytes) {
  in_ += bytes;
  while (step()) {
  }
  if (!over() && room() == 0)
    turn_away(admitted() ? Refusal::kFrame : Refusal::kStranger,
              admitted() ? "rank " + std::to_string(rank_) + ", which asks without an end," : kStranger);
}

/// Takes the next thing off what has come; false when it is not all there.
bool StoreSession::step() {
  switch (state_) {
    case State::kHello: return take_hello();
    case State::kProof: return take_proof();
    case State::kAdmitted: return !waiting_ && take_request();
    case State::kOver: break;
  }
  return false;
}

void StoreSession::turn_away(Refusal refusal, const std::string& who) {
  refusal_ = refusal;
  refused_ = who;
  state_ = State::kOver;
  in_.clear();
}

void StoreSession::challenge(wire::Verdict verdict, Refusal refusal, const std::string& who) {
  std::string text(wire::kMagic);
  wire::put(text, wire::kProtocol);
  wire::put(text, verdict);
  wire::put(text, static_cast<std::int32_t>(credentials_.generation));
  wire::put(text, server_);
  text += bytes_of(new_nonce());
  wire::Handshake agreed{};
  if (verdict == wire::Verdict::kWelcome) agreed = wire::handshake(credentials_.key, in_, text);
  out_ += text;
  out_ += bytes_of(agreed.of_server);
  if (verdict != wire::Verdict::kWelcome) return turn_away(refusal, who);
  proof_ = agreed.of_client;
  requests_ = wire::Seal(agreed.key, wire::kRequests);
  replies_ = wire::Seal(agreed.key, wire::kReplies);
  state_ = State::kProof;
}

bool StoreSession::take_hello() {
  const std::size_t beginning = std::min(in_.size(), wire::kMagic.size());
  if (std::string_view(in_).substr(0, beginning) != wire::kMagic.substr(0, beginning)) {
    turn_away(Refusal::kStranger, kStranger);
    return false;
  }
  wire::Reader reader(in_);
  reader.take_bytes(wire::kMagic.size());
  const auto protocol = reader.take<std::uint16_t>();
  const std::size_t length = reader.take<std::uint8_t>();
  if (!reader.ok()) return false;
  if (protocol != wire::kProtocol) {
    challenge(wire::Verdict::kOtherProtocol, Refusal::kProtocol,
              "a rank of another version of Lockstep, which speaks protocol " + std::to_string(protocol) + ",");
    return false;
  }
  if (length > wire::kMaxJob) {
    turn_away(Refusal::kStranger, kStranger);
    return false;
  }
  const std::string job(reader.take_bytes(length));
  const auto generation = reader.take<std::int32_t>();
  rank_ = reader.take<std::int32_t>();
  reader.take_bytes(wire::kMac);
  if (!reader.ok()) return false;
  const std::string rank = "rank " + std::to_string(rank_);
  const std::string more(reader.rest());
  in_.resize(in_.size() - more.size());
  if (job != credentials_.job)
    challenge(wire::Verdict::kOtherJob, Refusal::kJob, rank + " of another job, " + base::quoted(job, 80) + ",");
  else if (generation != credentials_.generation)
    challenge(wire::Verdict::kOtherGeneration, Refusal::kGeneration,
              rank + " of another start of this job, " + std::to_string(generation) + " instead of " +
                  std::to_string(credentials_.generation) + ",");
  else
    challenge(wire::Verdict::kWelcome, Refusal::kNone, "");
  in_ = over() ? "" : more;
  return !over();
}

bool StoreSession::take_proof() {
  if (in_.size() < wire::kMac) return false;
  const bool right = equal(proof_, std::string_view(in_).substr(0, wire::kMac));
  in_.erase(0, wire::kMac);
  wire::put(out_, right ? wire::Verdict::kWelcome : wire::Verdict::kOtherKey);
  if (right)
    state_ = State::kAdmitted;
  else
    turn_away(Refusal::kKey,
              "one that calls itself rank " + std::to_string(rank_) + " and does not have this job's key");
  return right;
}

bool StoreSession::take_request() {
  if (in_.size() < wire::kLength) return false;
  const auto size = wire::take_length(in_);
  if (!size) {
    turn_away(Refusal::kFrame, "rank " + std::to_string(rank_) + ", from which came no length of a frame,");
    return false;
  }
  wire::Reader reader(std::string_view(in_).substr(wire::kLength));
  const std::string_view body = reader.take_bytes(*size);
  const std::string_view mac = reader.take_bytes(wire::kMac);
  if (!reader.ok()) return false;
  if (!requests_.fits(body, mac)) {
    turn_away(Refusal::kFrame, "rank " + std::to_string(rank_) + ", whose bytes were changed on the way,");
    return false;
  }
  handle(body);
  in_.erase(0, wire::kLength + *size + wire::kMac);
  return true;
}

void StoreSession::reply(wire::Status status, std::string_view value) {
  std::string body;
  wire::put(body, status);
  body += value;
  out_ += replies_.close(body);
}

void StoreSession::look() {
  if (!waiting_) return;
  if (const auto value = store_.find(waits_for_, Deadline::never()))  // bounded: the table is in this process
    reply(wire::Status::kValue, *value);
  else if (wait_until_.expired())
    reply(wire::Status::kNone, {});
  else
    return;
  waiting_ = false;
  while (step()) {
  }
}

void StoreSession::handle(std::string_view frame) {
  wire::Reader reader(frame);
  const auto verb = reader.take<wire::Verb>();
  const auto wait_ms = reader.take<std::uint32_t>();
  const std::string_view key = reader.take_text(wire::kMaxKey);
  const std::string_view expected = reader.take_text(wire::kMaxValue);
  const std::string_view value = reader.rest();
  if (!reader.ok() || value.size() > wire::kMaxValue) return reply(wire::Status::kRefused, "store: malformed request");
  const Deadline now = Deadline::never();  // bounded: the table is in this process
  try {
    switch (verb) {
      case wire::Verb::kSet: store_.set(key, value, now); return reply(wire::Status::kValue, {});
      case wire::Verb::kGet:
        if (const auto found = store_.find(key, now)) return reply(wire::Status::kValue, *found);
        if (wait_ms == 0) return reply(wire::Status::kNone, {});
        waits_for_ = key;
        wait_until_ = Deadline::in(std::chrono::milliseconds(wait_ms));
        waiting_ = true;
        return;
      case wire::Verb::kAdd: {
        const std::int64_t amount = base::parse_int_in("store: the amount to add", value, INT64_MIN, INT64_MAX);
        return reply(wire::Status::kValue, std::to_string(store_.add(key, amount, now)));
      }
      case wire::Verb::kCompareSet: return reply(wire::Status::kValue, store_.compare_set(key, expected, value, now));
    }
    reply(wire::Status::kRefused, "store: unknown verb");
  } catch (const base::UsageError& error) {
    reply(wire::Status::kRefused, error.what());
  }
}

}  // namespace lockstep::job
