// The content of a file, or of bytes, in a few digits: equal ones are the same.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::base {

/// XXH3 with 128 bits (Yann Collet's xxHash): no protection against somebody who wants two files to look alike.
class ContentHash {
 public:
  static constexpr std::size_t kHexDigits = 32;

  ContentHash();
  ~ContentHash();
  ContentHash(const ContentHash&) = delete;
  ContentHash& operator=(const ContentHash&) = delete;

  void add(std::string_view bytes);
  void add(const void* bytes, std::size_t num_bytes) { add({static_cast<const char*>(bytes), num_bytes}); }
  /// Of all that was added: 32 hexadecimal digits.
  std::string hex_digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::base
