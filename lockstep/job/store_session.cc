#include "lockstep/job/store_session.h"

#include <algorithm>
#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

using base::Deadline;

constexpr const char* kNotLockstepPeer = "a connection that does not follow the Lockstep protocol";
constexpr std::size_t kMaxReceiveBytes = 65536;
constexpr std::size_t kMaxInput =
    store_protocol::kMaxFrameBytes + kMaxReceiveBytes;  // a frame, and bytes that arrived with it

}  // namespace

std::size_t StoreSession::receive_capacity() const {
  if (state_ == State::kClosed) return 0;
  const std::size_t most = is_authenticated() ? kMaxInput : store_protocol::kMaxUnauthenticatedBytes;
  return std::min(kMaxReceiveBytes, most - std::min(most, input_.size()));
}

void StoreSession::receive(std::string_view bytes) {
  input_ += bytes;
  while (process_next()) {
  }
  if (!is_closed() && receive_capacity() == 0)
    refuse(is_authenticated() ? Refusal::kBadFrame : Refusal::kNotLockstep,
           is_authenticated() ? "rank " + std::to_string(rank_) + " (too much pending input)" : kNotLockstepPeer);
}

/// Processes the next message in the input. Returns false if it is incomplete.
bool StoreSession::process_next() {
  switch (state_) {
    case State::kHello: return process_hello();
    case State::kProof: return process_proof();
    case State::kAuthenticated: return !is_waiting_ && process_request();
    case State::kClosed: break;
  }
  return false;
}

void StoreSession::refuse(Refusal refusal, const std::string& peer) {
  refusal_ = refusal;
  refused_peer_ = peer;
  state_ = State::kClosed;
  input_.clear();
}

void StoreSession::send_challenge(store_protocol::HandshakeResult result, Refusal refusal, const std::string& peer) {
  std::string text(store_protocol::kMagic);
  base::put_number(text, store_protocol::kProtocol);
  base::put_number(text, result);
  base::put_number(text, static_cast<std::int32_t>(credentials_.generation));
  base::put_number(text, server_);
  text += mac_bytes(random_nonce());
  store_protocol::Handshake derived{};
  if (result == store_protocol::HandshakeResult::kAccepted)
    derived = store_protocol::derive_handshake(credentials_.key, input_, text);
  output_ += text;
  output_ += mac_bytes(derived.server_proof);
  if (result != store_protocol::HandshakeResult::kAccepted) return refuse(refusal, peer);
  proof_ = derived.client_proof;
  requests_ = store_protocol::FrameAuthenticator(derived.key, store_protocol::kRequestDirection);
  replies_ = store_protocol::FrameAuthenticator(derived.key, store_protocol::kReplyDirection);
  state_ = State::kProof;
}

bool StoreSession::process_hello() {
  const std::size_t prefix_size = std::min(input_.size(), store_protocol::kMagic.size());
  if (std::string_view(input_).substr(0, prefix_size) != store_protocol::kMagic.substr(0, prefix_size)) {
    refuse(Refusal::kNotLockstep, kNotLockstepPeer);
    return false;
  }
  if (input_.size() < store_protocol::kHelloPrefixBytes) return false;
  base::ByteReader reader(input_, store_protocol::kSubject);
  reader.bytes(store_protocol::kMagic.size());
  const auto protocol = reader.number<std::uint16_t>();
  const std::size_t length = reader.number<std::uint8_t>();
  if (protocol != store_protocol::kProtocol) {
    send_challenge(store_protocol::HandshakeResult::kOtherProtocol, Refusal::kProtocol,
                   "a rank of another Lockstep version (protocol " + std::to_string(protocol) + ")");
    return false;
  }
  if (length > store_protocol::kMaxJobNameBytes) {
    refuse(Refusal::kNotLockstep, kNotLockstepPeer);
    return false;
  }
  if (reader.remaining().size() < length + store_protocol::kHelloSuffixBytes) return false;
  const std::string job(reader.bytes(length));
  const auto generation = reader.number<std::int32_t>();
  rank_ = reader.number<std::int32_t>();
  reader.bytes(store_protocol::kMacBytes);
  const std::string rank = "rank " + std::to_string(rank_);
  const std::string following(reader.remaining());
  input_.resize(input_.size() - following.size());
  if (job != credentials_.job)
    send_challenge(store_protocol::HandshakeResult::kOtherJob, Refusal::kJob,
                   rank + " of another job (" + base::quoted(job, 80) + ")");
  else if (generation != credentials_.generation)
    send_challenge(store_protocol::HandshakeResult::kOtherGeneration, Refusal::kGeneration,
                   rank + " of generation " + std::to_string(generation) + " instead of generation " +
                       std::to_string(credentials_.generation) + " of this job");
  else
    send_challenge(store_protocol::HandshakeResult::kAccepted, Refusal::kNone, "");
  input_ = is_closed() ? "" : following;
  return !is_closed();
}

bool StoreSession::process_proof() {
  if (input_.size() < store_protocol::kMacBytes) return false;
  const bool is_valid = equal_constant_time(proof_, std::string_view(input_).substr(0, store_protocol::kMacBytes));
  input_.erase(0, store_protocol::kMacBytes);
  base::put_number(output_,
                   is_valid ? store_protocol::HandshakeResult::kAccepted : store_protocol::HandshakeResult::kOtherKey);
  if (is_valid)
    state_ = State::kAuthenticated;
  else
    refuse(Refusal::kKey,
           "a connection that claims to be rank " + std::to_string(rank_) + " but does not have this job's key");
  return is_valid;
}

bool StoreSession::process_request() {
  if (input_.size() < store_protocol::kLengthBytes) return false;
  const auto size = store_protocol::parse_length(input_);
  if (!size) {
    refuse(Refusal::kBadFrame, "rank " + std::to_string(rank_) + " (invalid frame length)");
    return false;
  }
  if (input_.size() < store_protocol::kLengthBytes + *size + store_protocol::kMacBytes) return false;
  base::ByteReader reader(std::string_view(input_).substr(store_protocol::kLengthBytes), store_protocol::kSubject);
  const std::string_view body = reader.bytes(*size);
  const std::string_view mac = reader.bytes(store_protocol::kMacBytes);
  if (!requests_.verify(body, mac)) {
    refuse(Refusal::kBadFrame, "rank " + std::to_string(rank_) + " (corrupted frame)");
    return false;
  }
  execute_request(body);
  input_.erase(0, store_protocol::kLengthBytes + *size + store_protocol::kMacBytes);
  return true;
}

void StoreSession::reply(store_protocol::ReplyStatus status, std::string_view value) {
  std::string body;
  base::put_number(body, status);
  body += value;
  output_ += replies_.make_frame(body);
}

void StoreSession::answer_waiting() {
  if (!is_waiting_) return;
  if (const auto value = store_.find(waiting_key_, Deadline::never()))  // bounded: the store is in this process
    reply(store_protocol::ReplyStatus::kValue, *value);
  else if (wait_until_.expired())
    reply(store_protocol::ReplyStatus::kNone, {});
  else
    return;
  is_waiting_ = false;
  while (process_next()) {
  }
}

void StoreSession::execute_request(std::string_view frame) {
  const Deadline now = Deadline::never();  // bounded: the store is in this process
  try {
    base::ByteReader reader(frame, store_protocol::kSubject);
    const auto operation = static_cast<store_protocol::StoreOperation>(reader.number<std::uint8_t>());
    const auto wait_ms = reader.number<std::uint32_t>();
    const std::string_view key = reader.text(kMaxKeyBytes);
    const std::string_view expected = reader.text(kMaxValueBytes);
    const std::string_view value = reader.remaining();
    check_limits(key, value);
    switch (operation) {
      case store_protocol::StoreOperation::kSet:
        store_.set(key, value, now);
        return reply(store_protocol::ReplyStatus::kValue, {});
      case store_protocol::StoreOperation::kGet:
        if (const auto found = store_.find(key, now)) return reply(store_protocol::ReplyStatus::kValue, *found);
        if (wait_ms == 0) return reply(store_protocol::ReplyStatus::kNone, {});
        waiting_key_ = key;
        wait_until_ = Deadline::in(std::chrono::milliseconds(wait_ms));
        is_waiting_ = true;
        return;
      case store_protocol::StoreOperation::kAdd: {
        const std::int64_t amount = base::parse_int_in_range("store: the amount to add", value, INT64_MIN, INT64_MAX);
        return reply(store_protocol::ReplyStatus::kValue, std::to_string(store_.add(key, amount, now)));
      }
      case store_protocol::StoreOperation::kCompareSet:
        return reply(store_protocol::ReplyStatus::kValue, store_.compare_set(key, expected, value, now));
    }
    reply(store_protocol::ReplyStatus::kRefused, "store: unknown operation");
  } catch (const base::Error& error) {
    reply(store_protocol::ReplyStatus::kRefused, error.what());
  }
}

}  // namespace lockstep::job
