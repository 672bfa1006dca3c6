#include "lockstep/base/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace lockstep::base {
namespace {

// Encodes `code` in `length` bytes without validating it.
std::string encode_utf8(unsigned code, int length) {
  if (length == 1) return std::string(1, static_cast<char>(code));
  std::string bytes(static_cast<std::size_t>(length), '\0');
  for (int i = length - 1; i > 0; --i, code >>= 6)
    bytes[static_cast<std::size_t>(i)] = static_cast<char>(0x80 | (code & 0x3f));
  const unsigned marks[] = {0, 0, 0xC0, 0xE0, 0xF0};
  bytes[0] = static_cast<char>(marks[length] | code);
  return bytes;
}

TEST(Utf8, AcceptsOnlyShortestForms) {
  const unsigned limits[] = {0x80, 0x800, 0x10000, 0x200000};
  for (int length = 1; length <= 4; ++length)
    for (unsigned code = 0; code < limits[length - 1]; code += length < 4 ? 1 : 61) {
      const bool shortest = length == 1 || code >= limits[length - 2];
      const bool allowed = shortest && code <= 0x10FFFF && !(code >= 0xD800 && code <= 0xDFFF);
      const auto bytes = encode_utf8(code, length);
      ASSERT_EQ(utf8_length(bytes + "x"), allowed ? bytes.size() : 0u) << std::hex << code;
      ASSERT_EQ(is_utf8("a" + bytes), allowed);
      if (length > 1) {
        ASSERT_FALSE(is_utf8(bytes.substr(0, bytes.size() - 1)));
        ASSERT_EQ(utf8_length(bytes.substr(0, bytes.size() - 1) + "x"), 0u);
      }
    }
}

TEST(Utf8, RejectsEmptyAndStrayBytes) {
  EXPECT_EQ(utf8_length(""), 0u);
  EXPECT_TRUE(is_utf8(""));
  for (const char* const stray : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xf5\x80\x80\x80", "\xff"})
    EXPECT_FALSE(is_utf8(stray));
}

}  // namespace
}  // namespace lockstep::base
