// Encodes numbers and texts as bytes, and decodes bytes from an untrusted peer. Numbers are little-endian; texts and
// lists follow their length, a u32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace lockstep::base {

/// Appends `value`, an integer or an enumerator, in sizeof(T) bytes.
template <typename T>
void put_number(std::string& out, T value) {
  static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i));
}

/// Appends the length of `text`, and its bytes.
void put_text(std::string& out, std::string_view text);
/// Appends the number of texts, and each text as put_text().
void put_texts(std::string& out, const std::vector<std::string>& texts);

/// Reads values from the front of `bytes`, which must outlive the reader and the views that it returns. Every function
/// throws Error kProtocol if bytes are missing, before it allocates memory. Not thread-safe.
class ByteReader {
 public:
  /// `subject` begins the message of each error: "launcher and agent". It must outlive the reader.
  ByteReader(std::string_view bytes, std::string_view subject) : rest_(bytes), subject_(subject) {}

  /// Returns the next `size` bytes.
  std::string_view bytes(std::size_t size);

  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>, "compare the number of an enumerator with its range before casting it");
    const std::string_view encoded = bytes(sizeof(T));
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
      value |= static_cast<std::uint64_t>(static_cast<unsigned char>(encoded[i])) << (8 * i);
    return static_cast<T>(value);
  }

  /// Returns the next text. Throws also if it has more than `limit` bytes.
  std::string_view text(std::size_t limit = UINT32_MAX);
  std::vector<std::string> texts();

  /// Returns the length of a list whose elements take at least `min_bytes` each. Throws if the remaining bytes are too
  /// few for that length, so that the caller can allocate memory for the list.
  std::size_t count(std::size_t min_bytes);

  /// Returns the bytes that have not been read.
  std::string_view remaining() const { return rest_; }
  /// Throws if bytes have not been read.
  void end() const;

 private:
  [[noreturn]] void fail(const std::string& what) const;

  std::string_view rest_;
  std::string_view subject_;
};

}  // namespace lockstep::base
