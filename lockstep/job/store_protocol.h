// The bytes between StoreClient and StoreServer.
//
// hello     (client)  "LOCKSTEP" u16 protocol, u8 length of the job's name, the name, u32 generation, u32 rank, nonce
// challenge (server)  "LOCKSTEP" u16 protocol, u8 verdict, u32 generation, u64 number of this server, nonce, proof
// proof     (client)  proof
// admission (server)  u8 verdict
// request             length, u8 verb, u32 wait in ms, u32 key length, key, u32 expected length, expected, value; mac
// reply               length, u8 status, value; mac
//
// Integers are little-endian; nonces, proofs and macs have 32 bytes. A length, a u32 and its complement, so that one
// that was changed on the way asks for nothing, counts neither itself nor the mac, and is checked against the limits
// below before memory is taken. Each end proves that it has the job's key by a mac of all that was said before, the
// other's nonce in it; the frames that follow carry a mac, by a key of this connection, of their direction, their
// number there and their bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/job/job_key.h"
#include "lockstep/job/store.h"

namespace lockstep::job::store_protocol {

inline constexpr std::string_view kMagic = "LOCKSTEP";
inline constexpr std::uint16_t kProtocol = 2;
inline constexpr std::size_t kMaxKey = kMaxKeyBytes;
inline constexpr std::size_t kMaxValue = kMaxValueBytes;
inline constexpr std::size_t kMaxFrameBytes = 2 * kMaxValue + kMaxKey + 64;
inline constexpr std::size_t kMaxJobNameBytes = 128;
inline constexpr std::size_t kMacBytes = sizeof(Mac);
inline constexpr std::size_t kMaxHelloBytes = 8 + 2 + 1 + kMaxJobNameBytes + 4 + 4 + kMacBytes;
inline constexpr std::size_t kMaxUnauthenticatedBytes = kMaxHelloBytes + kMacBytes;  // that a stranger may send
inline constexpr std::size_t kChallengePrefixBytes = 8 + 2 + 1;  // of a challenge: what every protocol begins with
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

template <typename T>
void put(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

inline void put_text(std::string& out, std::string_view text) {
  put(out, static_cast<std::uint32_t>(text.size()));
  out.append(text);
}

/// Takes values off the front of a frame; ok() turns false for good when the frame is too short.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T read() {
    T value{};
    if (bytes_.size() < sizeof value) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }

  /// `size` bytes.
  std::string_view read_bytes(std::size_t size) {
    if (size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view bytes = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return bytes;
  }

  /// A length of at most `limit`, and as many bytes.
  std::string_view read_text(std::size_t limit) {
    const auto size = read<std::uint32_t>();
    if (!ok_ || size > limit) {
      ok_ = false;
      return {};
    }
    return read_bytes(size);
  }

  std::string_view remaining() const { return bytes_; }
  bool ok() const { return ok_; }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

/// What a client says first.
std::string make_hello(const Credentials& credentials, int rank, const Mac& nonce);

/// What both ends compute of a hello and of a challenge up to its proof, which ends with the server's nonce.
struct Handshake {
  Mac server_proof, client_proof;  ///< proofs
  JobKey key;                      ///< of the frames
};
Handshake derive_handshake(const JobKey& key, std::string_view hello, std::string_view challenge);

inline constexpr std::size_t kLengthBytes = 8;  // bytes of a frame's length
inline void put_length(std::string& out, std::size_t length) {
  put(out, static_cast<std::uint32_t>(length));
  put(out, ~static_cast<std::uint32_t>(length));
}
/// Of the first kLengthBytes of `bytes`; nothing when it is no length, or one over kMaxFrameBytes.
std::optional<std::size_t> parse_length(std::string_view bytes);

/// One direction of an admitted connection.
class FrameAuthenticator {
 public:
  FrameAuthenticator(const JobKey& key, char direction) : key_(key), direction_(direction) {}
  /// `body` as a frame.
  std::string make_frame(std::string_view body);
  /// Whether `mac` is that of `body`, the next frame.
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
