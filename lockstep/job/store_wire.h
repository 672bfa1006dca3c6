// The bytes between StoreClient and StoreServer.
//
// hello    (client)  "LOCKSTEP" u16 protocol, u8 length of the job's name, the name
// welcome  (server)  "LOCKSTEP" u16 protocol, u8 verdict
// request            u32 length, u8 verb, u32 wait in ms, u32 key length, key, u32 expected length, expected, value
// reply              u32 length, u8 status, value
// Integers are little-endian. A length is checked against the limits below before memory is taken.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/job/store.h"

namespace lockstep::job::wire {

inline constexpr std::string_view kMagic = "LOCKSTEP";
inline constexpr std::uint16_t kProtocol = 1;
inline constexpr std::size_t kMaxKey = kMaxKeyBytes;
inline constexpr std::size_t kMaxValue = kMaxValueBytes;
inline constexpr std::size_t kMaxFrame = 2 * kMaxValue + kMaxKey + 64;
inline constexpr std::size_t kMaxJob = 128;
inline constexpr std::size_t kWelcomeSize = 8 + 2 + 1;

enum class Verdict : std::uint8_t { kWelcome = 0, kOtherProtocol = 1, kOtherJob = 2 };
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

  std::string_view take_text(std::size_t limit) {
    const auto size = take<std::uint32_t>();
    if (!ok_ || size > limit || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view text = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return text;
  }

  std::string_view rest() const { return bytes_; }
  bool ok() const { return ok_; }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace lockstep::job::wire
