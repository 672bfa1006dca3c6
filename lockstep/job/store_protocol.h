// The protocol between StoreClient and StoreServer.
//
// hello     (client)  "LOCKSTEP" u16 protocol, u8 length of the job's name, the name, u32 generation, u32 rank, nonce
// challenge (server)  "LOCKSTEP" u16 protocol, u8 result, u32 generation, u64 number of this server, nonce, proof
// proof     (client)  proof
// admission (server)  u8 result
// request             length, u8 verb, u32 wait in ms, u32 key length, key, u32 expected length, expected, value; mac
// reply               length, u8 status, value; mac
//
// Integers are little-endian; nonces, proofs and MACs have 32 bytes. A length is a u32 followed by its complement, so
// that a corrupted length is detected. It counts neither itself nor the MAC. The receiver compares it with the limits
// below before it allocates memory. Each end proves that it has the job's key by a MAC of all bytes exchanged before,
// which include the other end's nonce. Every later frame has a MAC of its direction, its number in that direction, and
// its bytes, computed with a key of this connection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/byte_codec.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/store.h"

namespace lockstep::job::store_protocol {

inline constexpr std::string_view kMagic = "LOCKSTEP";
inline constexpr std::uint16_t kProtocol = 2;
inline constexpr std::size_t kMaxFrameBytes = 2 * kMaxValueBytes + kMaxKeyBytes + 64;
inline constexpr std::size_t kMaxJobNameBytes = 128;
inline constexpr std::size_t kMacBytes = sizeof(Mac);
inline constexpr std::size_t kHelloPrefixBytes = 8 + 2 + 1;          // before the job's name
inline constexpr std::size_t kHelloSuffixBytes = 4 + 4 + kMacBytes;  // after it
inline constexpr std::size_t kMaxHelloBytes = kHelloPrefixBytes + kMaxJobNameBytes + kHelloSuffixBytes;
inline constexpr std::size_t kMaxUnauthenticatedBytes = kMaxHelloBytes + kMacBytes;  // from an unauthenticated client
inline constexpr std::size_t kChallengePrefixBytes = 8 + 2 + 1;  // the part that is common to all protocol versions
inline constexpr std::size_t kChallengeBytes = kChallengePrefixBytes + 4 + 8 + kMacBytes + kMacBytes;
static_assert(kMaxUnauthenticatedBytes <= 256);

enum class HandshakeResult : std::uint8_t {
  kAccepted = 0,
  kOtherProtocol = 1,
  kOtherJob = 2,
  kOtherGeneration = 3,
  kOtherKey = 4
};
enum class StoreOperation : std::uint8_t { kSet = 0, kGet = 1, kAdd = 2, kCompareSet = 3 };
enum class ReplyStatus : std::uint8_t { kValue = 0, kNone = 1, kRefused = 2 };

/// Begins the message of each error about bytes that do not follow this protocol.
inline constexpr std::string_view kSubject = "store";

/// Returns the first message of a client.
std::string make_hello(const Credentials& credentials, int rank, const Mac& nonce);

/// The values that both ends derive from the job's key, the hello and the challenge without its proof.
struct Handshake {
  Mac server_proof, client_proof;
  JobKey key;  ///< for the MACs of this connection's frames
};
Handshake derive_handshake(const JobKey& key, std::string_view hello, std::string_view challenge);

inline constexpr std::size_t kLengthBytes = 8;  // size of an encoded length
inline void put_length(std::string& out, std::size_t length) {
  base::put_number(out, static_cast<std::uint32_t>(length));
  base::put_number(out, ~static_cast<std::uint32_t>(length));
}
/// Decodes the first kLengthBytes of `bytes`, which has at least as many. Returns nullopt for an invalid length or one
/// over kMaxFrameBytes.
std::optional<std::size_t> parse_length(std::string_view bytes);

/// Adds and verifies the MACs of the frames in one direction of an authenticated connection.
class FrameAuthenticator {
 public:
  FrameAuthenticator(const JobKey& key, char direction) : key_(key), direction_(direction) {}
  /// Returns the next frame, with `body` as its content.
  std::string make_frame(std::string_view body);
  /// Returns whether `mac` is valid for `body` as the next frame.
  bool verify(std::string_view body, std::string_view mac) { return equal_constant_time(next_mac(body), mac); }

 private:
  Mac next_mac(std::string_view body);
  JobKey key_;
  char direction_;
  std::uint64_t number_ = 0;
};
inline constexpr char kRequestDirection = 'q';
inline constexpr char kReplyDirection = 'r';

}  // namespace lockstep::job::store_protocol
