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

namespace lockstep::job::wire {

inline constexpr std::string_view kMagic = "LOCKSTEP";
inline constexpr std::uint16_t kProtocol = 2;
inline constexpr std::size_t kMaxKey = kMaxKeyBytes;
inline constexpr std::size_t kMaxValue = kMaxValueBytes;
inline constexpr std::size_t kMaxFrame = 2 * kMaxValue + kMaxKey + 64;
inline constexpr std::size_t kMaxJob = 128;
inline constexpr std::size_t kMac = sizeof(Mac);
inline constexpr std::size_t kMaxHello = 8 + 2 + 1 + kMaxJob + 4 + 4 + kMac;
inline constexpr std::size_t kMaxBefore = kMaxHello + kMac;  // that a stranger may send
inline constexpr std::size_t kVerdictSize = 8 + 2 + 1;       // of a challenge: what every protocol begins with
inline constexpr std::size_t kChallengeSize = kVerdictSize + 4 + 8 + kMac + kMac;
static_assert(kMaxBefore <= 256);

enum class Verdict : std::uint8_t {
  kWelcome = 0,
  kOtherProtocol = 1,
  kOtherJob = 2,
  kOtherGeneration = 3,
  kOtherKey = 4
};
enum class Verb : std::uint8_t { kSet = 0, kGet = 1, kAdd = 2, kCompareSet = 3 };
enum class Status : std::uint8_t { kValue = 0, kNone = 1, kRefused = 2 };

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
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T take() {
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
  std::string_view take_bytes(std::size_t size) {
    if (size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view bytes = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return bytes;
  }

  /// A length of at most `limit`, and as many bytes.
  std::string_view take_text(std::size_t limit) {
    const auto size = take<std::uint32_t>();
    if (!ok_ || size > limit) {
      ok_ = false;
      return {};
    }
    return take_bytes(size);
  }

  std::string_view rest() const { return bytes_; }
  bool ok() const { return ok_; }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

/// What a client says first.
std::string hello(const Credentials& credentials, int rank, const Mac& nonce);

/// What both ends compute of a hello and of a challenge up to its proof, which ends with the server's nonce.
struct Handshake {
  Mac of_server, of_client;  ///< proofs
  JobKey key;                ///< of the frames
};
Handshake handshake(const JobKey& key, std::string_view hello, std::string_view challenge);

inline constexpr std::size_t kLength = 8;  // bytes of a frame's length
inline void put_length(std::string& out, std::size_t length) {
  put(out, static_cast<std::uint32_t>(length));
  put(out, ~static_cast<std::uint32_t>(length));
}
/// Of the first kLength of `bytes`; nothing when it is no length, or one over kMaxFrame.
std::optional<std::size_t> take_length(std::string_view bytes);

/// One direction of an admitted connection.
class Seal {
 public:
  Seal(const JobKey& key, char direction) : key_(key), direction_(direction) {}
  /// `body` as a frame.
  std::string close(std::string_view body);
  /// Whether `mac` is that of `body`, the next frame.
  bool fits(std::string_view body, std::string_view mac) { return equal(next(body), mac); }

 private:
  Mac next(std::string_view body);
  JobKey key_;
  char direction_;
  std::uint64_t number_ = 0;
};
inline constexpr char kRequests = 'q';
inline constexpr char kReplies = 'r';

}  // namespace lockstep::job::wire
