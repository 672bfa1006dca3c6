// Encodes and decodes the values inside frames. Numbers are little-endian; texts and lists follow their length.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::launcher {

/// Throws Error kProtocol. `what` describes a frame that this program would not have written.
[[noreturn]] inline void throw_protocol_error(const std::string& what) {
  throw base::Error(base::Cause::kProtocol, "launcher and agent: " + what);
}

template <typename T>
void put(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i));
}

template <typename T>
T number_at(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return static_cast<T>(value);
}

inline void put_text(std::string& out, std::string_view text) {
  put(out, static_cast<std::uint32_t>(text.size()));
  out += text;
}

inline void put_texts(std::string& out, const std::vector<std::string>& texts) {
  put(out, static_cast<std::uint32_t>(texts.size()));
  for (const std::string& text : texts) put_text(out, text);
}

/// Reads values from the front of a payload. If the payload is too short, throws Error kProtocol before it allocates
/// memory.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : rest_(bytes) {}

  std::string_view bytes(std::size_t size) {
    if (size > rest_.size())
      throw_protocol_error("a value of " + std::to_string(size) + " bytes; expected at most " +
                           std::to_string(rest_.size()));
    const std::string_view value = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return value;
  }
  template <typename T>
  T number() {
    return number_at<T>(bytes(sizeof(T)));
  }
  std::string text() { return std::string(bytes(number<std::uint32_t>())); }
  /// Reads the length of a list whose elements take at least `min_bytes` each. Throws if the rest of the payload is too
  /// short for that length, before the caller allocates memory.
  std::size_t count(std::size_t min_bytes) {
    const auto n = number<std::uint32_t>();
    if (n > rest_.size() / min_bytes)
      throw_protocol_error("a list of " + std::to_string(n) + " elements in " + std::to_string(rest_.size()) +
                           " bytes");
    return n;
  }
  std::vector<std::string> texts() {
    std::vector<std::string> all(count(4));
    for (std::string& one : all) one = text();
    return all;
  }
  /// Throws if bytes of the payload have not been read.
  void end() const {
    if (!rest_.empty()) throw_protocol_error(std::to_string(rest_.size()) + " unexpected bytes at the end");
  }

 private:
  std::string_view rest_;
};

}  // namespace lockstep::launcher
