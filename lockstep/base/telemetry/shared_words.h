// A small struct in shared memory that is read while it is written, and texts in such structs.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "lockstep/base/atomic.h"

namespace lockstep::base::telemetry {

/// Holds a plain struct, which one thread at a time writes while others may read it. Zeroed memory is a zeroed
/// struct.
///
/// Memory ordering: each word is stored with release and loaded with acquire. A reader may see old and new words
/// together; if it has read a new word, it also reads what the writer stored before that word. So an atomic that the
/// writer changes before the words, and the reader checks after them, tells whether they belong together.
template <typename T>
class SharedWords {
 public:
  static_assert(sizeof(T) % sizeof(std::uint64_t) == 0 && std::is_trivially_copyable_v<T>);
  static constexpr std::size_t kWords = sizeof(T) / sizeof(std::uint64_t);

  void store(const T& value) noexcept {
    const auto words = std::bit_cast<std::array<std::uint64_t, kWords>>(value);
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
  }
  T load() const noexcept {
    std::array<std::uint64_t, kWords> words;
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    return std::bit_cast<T>(words);
  }

 private:
  Atomic<std::uint64_t> words_[kWords];
};

/// Copies `text` to a field of a zeroed struct, truncated if necessary. A text that fills the field has no terminating
/// zero.
template <std::size_t n>
void copy_text(char (&field)[n], std::string_view text) noexcept {
  const std::size_t size = std::min(n, text.size());
  if (size > 0) std::memcpy(field, text.data(), size);
}

/// Returns `text` with every character that is not printable ASCII, such as terminal escapes, replaced by '?'.
std::string printable(std::string_view text);

/// Returns what is in a field that ends with a zero byte or is full.
template <std::size_t n>
std::string bytes_of(const char (&field)[n]) {
  return std::string(field, ::strnlen(field, n));
}

/// Returns the same, printable.
template <std::size_t n>
std::string text_of(const char (&field)[n]) {
  return printable(bytes_of(field));
}

}  // namespace lockstep::base::telemetry
