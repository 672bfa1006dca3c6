// The values inside frames: little endian, texts and lists with their length in front.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::launcher {

/// Throws Error kProtocol.
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

/// Takes values from the front of a payload. What is not there is refused before memory is taken.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : rest_(bytes) {}

  std::string_view bytes(std::size_t size) {
    if (size > rest_.size())
      throw_protocol_error("a value of " + std::to_string(size) + " bytes where " + std::to_string(rest_.size()) +
                           " are left");
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  template <typename T>
  T number() {
    return number_at<T>(bytes(sizeof(T)));
  }
  std::string text() { return std::string(bytes(number<std::uint32_t>())); }
  /// A count of things that take at least `least` bytes each, so that a wild count cannot ask for memory.
  std::size_t count(std::size_t least) {
    const auto n = number<std::uint32_t>();
    if (n > rest_.size() / least)
      throw_protocol_error("a list of " + std::to_string(n) + " in " + std::to_string(rest_.size()) + " bytes");
    return n;
  }
  std::vector<std::string> texts() {
    std::vector<std::string> all(count(4));
    for (std::string& one : all) one = text();
    return all;
  }
  void end() const {
    if (!rest_.empty()) throw_protocol_error(std::to_string(rest_.size()) + " bytes too many");
  }

 private:
  std::string_view rest_;
};

}  // namespace lockstep::launcher
