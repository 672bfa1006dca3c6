// Fuzzes the bytes that a store server receives from an unauthenticated and from an authenticated client.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/job/local_store.h"
#include "lockstep/job/store_session.h"

using namespace lockstep::job;

namespace {

const Credentials kJob{"job", 3, JobKey(std::string(32, 'k'))};

void require(bool good) {
  if (!good) std::abort();
}

/// Passes `bytes` to the session in segments of at most `piece` bytes.
void feed(StoreSession& session, std::string_view bytes, std::size_t piece) {
  while (!bytes.empty() && !session.is_closed()) {
    const std::size_t size = std::min({bytes.size(), piece, session.receive_capacity()});
    require(size > 0);
    session.receive(bytes.substr(0, size));
    bytes.remove_prefix(size);
    session.answer_waiting();
    session.output().clear();
  }
}

void feed_unauthenticated(std::string_view bytes, std::size_t piece) {
  LocalStore store;
  StoreSession session(kJob, 7, store);
  std::size_t taken = 0;
  for (std::size_t at = 0; at < bytes.size() && !session.is_closed(); at += piece) {
    const std::string_view part = bytes.substr(at, std::min(piece, session.receive_capacity()));
    taken += part.size();
    session.receive(part);
    require(!session.is_authenticated());  // no input can contain a valid proof
    require(taken <= 256);
  }
}

/// Authenticates with the key, then sends frames from the input with valid MACs, and finally a frame with an invalid
/// one.
void feed_authenticated(std::string_view bytes, std::size_t piece) {
  LocalStore store;
  StoreSession session(kJob, 7, store);
  const std::string hello = store_protocol::make_hello(kJob, 1, Mac{});
  session.receive(hello);
  const store_protocol::Handshake derived = store_protocol::derive_handshake(
      kJob.key, hello, session.output().substr(0, store_protocol::kChallengeBytes - store_protocol::kMacBytes));
  session.output().clear();
  session.receive(mac_bytes(derived.client_proof));
  require(session.is_authenticated());
  store_protocol::FrameAuthenticator requests(derived.key, store_protocol::kRequestDirection);
  while (bytes.size() > 1) {
    const std::size_t size = std::min<std::size_t>(static_cast<unsigned char>(bytes[0]), bytes.size() - 1);
    feed(session, requests.make_frame(bytes.substr(1, size)), piece);
    require(!session.is_closed());
    bytes.remove_prefix(1 + size);
  }
  using namespace std::string_view_literals;
  feed(session, "\x05\x00\x00\x00\xfa\xff\xff\xffhellohellohellohellohellohellohellohello"sv, piece);
  session.answer_waiting();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::size_t piece = 1 + data[1];
  if (data[0] % 2 == 0)
    feed_unauthenticated(bytes, piece);
  else
    feed_authenticated(bytes, piece);
  return 0;
}
