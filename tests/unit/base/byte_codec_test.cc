#include "lockstep/base/byte_codec.h"

#include <gtest/gtest.h>

#include <functional>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::base {
namespace {

using namespace std::string_literals;

enum class Tone : std::uint8_t { kLow = 3 };

std::string error_of(const std::function<void()>& call) {
  const auto error = tests::thrown<Error>(call);
  EXPECT_EQ(error.cause(), Cause::kProtocol);
  return error.what();
}

TEST(ByteCodec, WritesNumbersInLittleEndianOrder) {
  std::string bytes;
  put_number(bytes, std::uint16_t{0x0201});
  put_number(bytes, std::int32_t{-2});
  put_number(bytes, Tone::kLow);
  put_number(bytes, true);
  EXPECT_EQ(bytes, "\x01\x02\xfe\xff\xff\xff\x03\x01"s);
}

TEST(ByteCodec, ReadsWhatItWrites) {
  std::string bytes;
  put_number(bytes, INT64_MIN);
  put_number(bytes, UINT64_MAX);
  put_text(bytes, "a\0b"s);
  put_texts(bytes, {"", "two"});
  put_number(bytes, std::uint32_t{1});
  bytes += "tail";
  ByteReader reader(bytes, "test");
  EXPECT_EQ(reader.number<std::int64_t>(), INT64_MIN);
  EXPECT_EQ(reader.number<std::uint64_t>(), UINT64_MAX);
  EXPECT_EQ(reader.text(), "a\0b"s);
  EXPECT_EQ(reader.texts(), (std::vector<std::string>{"", "two"}));
  EXPECT_EQ(reader.count(4), 1u);
  EXPECT_EQ(reader.remaining(), "tail");
  EXPECT_EQ(reader.bytes(4), "tail");
  reader.end();
}

TEST(ByteCodec, RejectsMissingBytes) {
  EXPECT_EQ(error_of([] { ByteReader("abc", "peer").number<std::int32_t>(); }),
            "peer: a value of 4 bytes; expected at most 3");
  EXPECT_EQ(error_of([] { ByteReader("\x05\0\0\0abcd"s, "peer").text(); }),
            "peer: a value of 5 bytes; expected at most 4");
  EXPECT_EQ(error_of([] { ByteReader("\x05\0\0\0abcde"s, "peer").text(4); }),
            "peer: a text of 5 bytes; expected at most 4");
}

TEST(ByteCodec, RejectsALengthBeforeItAllocatesMemory) {
  const std::string huge = "\xff\xff\xff\xff\0\0\0\0"s;
  EXPECT_EQ(error_of([&] { ByteReader(huge, "peer").texts(); }), "peer: a list of 4294967295 elements in 4 bytes");
  EXPECT_EQ(error_of([&] { ByteReader(huge, "peer").count(1); }), "peer: a list of 4294967295 elements in 4 bytes");
  EXPECT_EQ(error_of([&] { ByteReader(huge, "peer").text(); }),
            "peer: a value of 4294967295 bytes; expected at most 4");
}

TEST(ByteCodec, RejectsBytesAfterTheLastValue) {
  ByteReader reader("ab", "peer");
  reader.number<std::uint8_t>();
  EXPECT_EQ(error_of([&] { reader.end(); }), "peer: 1 unexpected bytes at the end");
}

}  // namespace
}  // namespace lockstep::base
