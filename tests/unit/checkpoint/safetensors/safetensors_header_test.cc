#include "lockstep/checkpoint/safetensors/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/limits.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string tensor_entry(const std::string& name, const std::string& fields) {
  return "\"" + name + "\":{" + fields + "}";
}
std::string bytes(const std::string& name, int begin, int end) {
  return tensor_entry(name, "\"dtype\":\"U8\",\"shape\":[" + std::to_string(end - begin) + "],\"data_offsets\":[" +
                                std::to_string(begin) + "," + std::to_string(end) + "]");
}

// Returns the error for a header, without the file's name; "" if it is accepted.
std::string header_error(const std::string& text, std::uint64_t num_data_bytes = 0) {
  const auto message = tests::message_of<base::FormatError>([&] { parse_header(text, num_data_bytes, "f.st"); });
  EXPECT_TRUE(message.empty() || message.starts_with("f.st:")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message.empty() ? "" : message.substr(5);
}

std::string reason_of_fields(const std::string& fields, std::uint64_t num_data_bytes = 0) {
  return header_error("{" + tensor_entry("w", fields) + "}", num_data_bytes);
}

TEST(SafetensorsHeader, ReturnsTensorEntries) {
  const auto header = parse_header(
      "{\"__metadata__\":{\"by\":\"me\",\"x\":\"\"},\"b.w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]}"
      ","
      "\"a\\u00e4\":{\"data_offsets\":[0,8],\"shape\":[],\"dtype\":\"I64\"},\"e\":{\"dtype\":\"F16\",\"shape\":[3,0],"
      "\"data_offsets\":[8,8]}}   ",
      32, "f");
  EXPECT_THAT(header.metadata, ElementsAre(testing::Pair("by", "me"), testing::Pair("x", "")));
  ASSERT_EQ(header.tensors.size(), 3u);
  const auto& b = header.tensors.at("b.w");
  EXPECT_EQ(b.dtype->name, "F32");
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(b.begin, 8u);
  EXPECT_EQ(b.end, 32u);
  EXPECT_TRUE(header.tensors.at("a\xc3\xa4").shape.empty());
  EXPECT_THAT(header.tensors.at("e").shape, ElementsAre(3, 0));
  EXPECT_EQ(header_error("{}"), "");
  EXPECT_EQ(header_error("{\"__metadata__\":{}}      "), "");
}

TEST(SafetensorsHeader, ChecksFirstAndLastCharacter) {
  EXPECT_THAT(header_error(""), HasSubstr("8: the header does not begin with '{'"));
  EXPECT_THAT(header_error(" {}"), HasSubstr("8: the header does not begin with '{'"));
  EXPECT_THAT(header_error("\xef\xbb\xbf{}"), HasSubstr("8: the header does not begin with '{'"));
  EXPECT_THAT(header_error("[]"), HasSubstr("8: the header does not begin with '{'"));
  EXPECT_THAT(header_error("{}\n"), HasSubstr("10: the header does not end with '}' and spaces"));
  EXPECT_THAT(header_error(std::string("{} \0", 4)), HasSubstr("11: the header does not end with '}' and spaces"));
  EXPECT_THAT(header_error("{} {}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(header_error("{}}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(header_error("{/**/}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(header_error("{,}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 0) + ",}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(header_error("{\"a\":}"), HasSubstr("14: invalid JSON: the parser stopped after"));
}

TEST(SafetensorsHeader, RejectsDuplicateKeys) {
  EXPECT_THAT(header_error("{" + bytes("a", 0, 1) + "," + bytes("a", 1, 2) + "}", 2), HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 1) + "," + bytes("\\u0061", 1, 2) + "}", 2),
              HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(header_error("{\"__metadata__\":{},\"__metadata__\":{}}"), HasSubstr("duplicate key \"__metadata__\""));
  EXPECT_THAT(header_error("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"), HasSubstr("duplicate key \"k\""));
  for (const std::string field : {"\"dtype\":\"U8\"", "\"shape\":[0]", "\"data_offsets\":[0,0]"})
    EXPECT_THAT(reason_of_fields("\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]," + field),
                HasSubstr("duplicate key"));
}

TEST(SafetensorsHeader, RejectsUnknownFields) {
  const std::string good = "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]";
  EXPECT_EQ(reason_of_fields(good), "");
  for (const char* const more :
       {",\"x\":1", ",\"x\":\"1\"", ",\"x\":[]", ",\"x\":{}", ",\"x\":null", ",\"x\":true", ",\"x\":1.5", ",\"x\":-1"})
    EXPECT_THAT(reason_of_fields(good + more), HasSubstr("in the field \"x\" of tensor \"w\"; expected \"dtype\""))
        << more;
  for (const char* const fields :
       {"", "\"dtype\":\"U8\",\"shape\":[0]", "\"dtype\":\"U8\",\"data_offsets\":[0,0]",
        "\"shape\":[0],\"data_offsets\":[0,0]", "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0]"})
    EXPECT_THAT(reason_of_fields(fields), HasSubstr("tensor \"w\" requires \"dtype\", \"shape\" and \"data_offsets\""));
  EXPECT_THAT(reason_of_fields("\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0,0]"),
              HasSubstr("more than 2 entries"));
  for (const char* const value : {"1", "\"x\"", "[]", "null", "true", "1.5"})
    EXPECT_THAT(header_error("{\"w\":" + std::string(value) + "}"), HasSubstr("expected an object for \"w\"")) << value;
  for (const char* const value : {"1", "{}", "[]", "null"})
    EXPECT_THAT(header_error("{\"__metadata__\":{\"k\":" + std::string(value) + "}}"),
                HasSubstr("expected a string for metadata \"k\""))
        << value;
  EXPECT_THAT(header_error("{\"__metadata__\":\"x\"}"), HasSubstr("expected an object for \"__metadata__\""));
}

TEST(SafetensorsHeader, AcceptsKnownDtypes) {
  for (const char* const name : {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
    EXPECT_EQ(reason_of_fields("\"dtype\":\"" + std::string(name) + "\",\"shape\":[0],\"data_offsets\":[0,0]"), "");
  EXPECT_THAT(reason_of_fields("\"dtype\":\"F99\""),
              HasSubstr("dtype of tensor \"w\" is \"F99\"; expected one of F64, F32, F16"));
  EXPECT_THAT(reason_of_fields("\"dtype\":\"f32\""), HasSubstr("expected one of F64"));
}

TEST(SafetensorsHeader, ShapeMustMatchNumBytes) {
  const auto of = [](const std::string& shape, std::uint64_t end) {
    return reason_of_fields(
        "\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[0," + std::to_string(end) + "]", end);
  };
  EXPECT_EQ(of("2,3", 24), "");
  EXPECT_EQ(of("", 4), "");
  EXPECT_THAT(of("2,3", 20), HasSubstr("tensor \"w\" has 20 bytes; expected 24 for its shape and dtype"));
  EXPECT_THAT(of("2", 0), HasSubstr("tensor \"w\" has 0 bytes; expected 8 for its shape and dtype"));
  EXPECT_THAT(of("-2", 8), HasSubstr("expected an integer of 0 or more"));
  EXPECT_THAT(of("2.0", 8), HasSubstr("expected an integer of 0 or more"));
  EXPECT_THAT(of("1e2", 8), HasSubstr("expected an integer of 0 or more"));
  EXPECT_THAT(of("\"2\"", 8), HasSubstr("found a string; expected an integer"));
  EXPECT_THAT(of("[2]", 8), HasSubstr("found a list; expected an integer"));
  EXPECT_THAT(of("18446744073709551616", 8), HasSubstr("expected an integer of 0 or more"));
  EXPECT_THAT(of("9223372036854775808", 8), HasSubstr("expected at most 2^63 - 1"));
  // Products that are correct modulo 2^64, and a 0 that hides the overflow of the rest.
  EXPECT_THAT(of("4611686018427387904", 0), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(of("4294967296,4294967296", 0), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(of("0,4294967296,4294967296", 0), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(of("4611686018427387904,0", 0), HasSubstr("more than 2^63 bytes"));
  std::string many = "1";
  for (std::size_t i = 1; i < files::kMaxDimensions; ++i) many += ",1";
  EXPECT_EQ(of(many, 4), "");
  EXPECT_THAT(of(many + ",1", 4), HasSubstr("shape of tensor \"w\" has more than 64 entries"));
}

TEST(SafetensorsHeader, TensorsMustCoverTheData) {
  EXPECT_EQ(header_error("{" + bytes("a", 2, 5) + "," + bytes("b", 0, 2) + "}", 5), "") << "in any order of the keys";
  EXPECT_THAT(header_error("{" + bytes("a", 1, 3) + "}", 3),
              HasSubstr("tensor \"a\" begins at byte 1 of the data, after a gap from 0"));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 2) + "," + bytes("b", 3, 4) + "}", 4),
              HasSubstr("\"b\" begins at byte 3 of the data, after a gap from 2"));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 2) + "," + bytes("b", 1, 3) + "}", 3),
              HasSubstr("\"b\" begins at byte 1 of the data, inside the previous tensor"));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 2) + "," + bytes("b", 0, 2) + "}", 2),
              HasSubstr("inside the previous tensor"));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 3) + "}", 2),
              HasSubstr("\"a\" ends at byte 3 of the data; the file has 2"));
  EXPECT_THAT(header_error("{" + bytes("a", 0, 3) + "}", 4),
              HasSubstr("1 bytes after the last tensor belong to no tensor"));
  EXPECT_THAT(header_error("{}", 1), HasSubstr("1 bytes after the last tensor belong to no tensor"));
  EXPECT_THAT(reason_of_fields("\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,1]", 2),
              HasSubstr("ends at 1, before it begins at 2"));
  EXPECT_THAT(header_error("{" + tensor_entry("a", "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]") + "}"),
              HasSubstr("after a gap from 0"));
}

TEST(SafetensorsHeader, NamesMustBeShortUtf8) {
  EXPECT_EQ(header_error("{" + bytes(std::string(files::kMaxNameBytes, 'n'), 0, 0) + "}"), "");
  EXPECT_THAT(header_error("{" + bytes(std::string(files::kMaxNameBytes + 1, 'n'), 0, 0) + "}"),
              HasSubstr("a name has 1025 bytes; expected at most 1024"));
  for (const char* const bad : {"\xff", "\xc0\xaf", "\xed\xa0\x80", "\\ud800", "\\ud800x", "\\x", "\x01"})
    EXPECT_NE(header_error("{" + bytes(bad, 0, 0) + "}"), "") << bad;
  EXPECT_EQ(header_error("{" + bytes("\\ud83d\\ude00", 0, 0) + "}"), "");
}

TEST(SafetensorsHeader, LimitsDepthAndTokensBeforeAllocating) {
  EXPECT_THAT(header_error("{\"a\":" + std::string(1'000'000, '[') + "}"),
              HasSubstr("20: nested deeper than the limit of 8 levels"));
  EXPECT_THAT(header_error("{\"a\":{\"b\":{}}}"), HasSubstr("found an object in the field \"b\" of tensor \"a\""));
  EXPECT_THAT(header_error("{\"" + std::string(2 << 20, 'x') + "\":1}"),
              HasSubstr("9: a string or number is longer than 1 MiB"));
  EXPECT_THAT(header_error("{\"a\":" + std::string(2 << 20, '1') + "}"),
              HasSubstr("a string or number is longer than 1 MiB"));
  std::string many = "{\"__metadata__\":{";
  for (int i = 0; i < 200'000; ++i) many += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  EXPECT_THAT(header_error(many + "}}"), HasSubstr("describes more than the limit of 12 MiB"));
  many = "{";
  for (int i = 0; i < 200'000; ++i) many += (i == 0 ? "" : ",") + bytes(std::to_string(i), 0, 0);
  EXPECT_LT(many.size(), files::kMaxHeaderBytes);
  EXPECT_THAT(header_error(many + "}"), HasSubstr("describes more than the limit of 12 MiB"));
}

TEST(SafetensorsHeader, TruncatedAndCorruptTextIsHandled) {
  const std::string good =
      "{\"__metadata__\":{\"k\":\"v\"}," + bytes("a", 0, 3) + "," + bytes("b\\u00e4", 3, 5) + "}  ";
  ASSERT_EQ(header_error(good, 5), "");
  for (std::size_t cut = 0; cut + 2 < good.size(); ++cut) EXPECT_NE(header_error(good.substr(0, cut), 5), "") << cut;
  for (std::size_t at = 0; at < good.size(); ++at)
    for (int byte = 0; byte < 256; ++byte) {
      auto changed = good;
      changed[at] = static_cast<char>(byte);
      try {
        const auto header = parse_header(changed, 5, "f");
        // An accepted header must be consistent: its tensors cover the 5 bytes.
        std::uint64_t sum = 0;
        for (const auto& [name, entry] : header.tensors) sum += entry.end - entry.begin;
        ASSERT_EQ(sum, 5u) << changed;
      } catch (const base::FormatError&) {
      }
    }
}

}  // namespace
}  // namespace lockstep::checkpoint
