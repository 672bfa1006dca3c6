// A 128-bit non-cryptographic hash of a file's or a buffer's content.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::base {

/// Computes XXH3 with 128 bits (Yann Collet's xxHash) incrementally. It detects accidental changes; it does not protect
/// against deliberate collisions. Not thread-safe.
class ContentHash {
 public:
  static constexpr std::size_t kHexDigits = 32;

  ContentHash();
  ~ContentHash();
  ContentHash(const ContentHash&) = delete;
  ContentHash& operator=(const ContentHash&) = delete;

  /// Appends `bytes` to the hashed content.
  void add(std::string_view bytes);
  void add(const void* bytes, std::size_t num_bytes) { add({static_cast<const char*>(bytes), num_bytes}); }
  /// Returns the hash of everything added so far as 32 hexadecimal digits.
  std::string hex_digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::base
