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

std::string tensor(const std::string& name, const std::string& fields) { return "\"" + name + "\":{" + fields + "}"; }
std::string bytes(const std::string& name, int begin, int end) {
  return tensor(name, "\"dtype\":\"U8\",\"shape\":[" + std::to_string(end - begin) + "],\"data_offsets\":[" +
                          std::to_string(begin) + "," + std::to_string(end) + "]");
}

// Why a header is refused, without the file's name; "" when it is taken.
std::string reason(const std::string& text, std::uint64_t num_data_bytes = 0) {
  const auto message = tests::message_of<base::FormatError>([&] { parse_header(text, num_data_bytes, "f.st"); });
  EXPECT_TRUE(message.empty() || message.starts_with("f.st:")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message.empty() ? "" : message.substr(5);
}

std::string reason_of_fields(const std::string& fields, std::uint64_t num_data_bytes = 0) {
  return reason("{" + tensor("w", fields) + "}", num_data_bytes);
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
  EXPECT_EQ(reason("{}"), "");
  EXPECT_EQ(reason("{\"__metadata__\":{}}      "), "");
}

TEST(SafetensorsHeader, ChecksFirstAndLastCharacter) {
  EXPECT_THAT(reason(""), HasSubstr("8: a header begins with '{'"));
  EXPECT_THAT(reason(" {}"), HasSubstr("8: a header begins with '{'"));
  EXPECT_THAT(reason("\xef\xbb\xbf{}"), HasSubstr("8: a header begins with '{'"));
  EXPECT_THAT(reason("[]"), HasSubstr("8: a header begins with '{'"));
  EXPECT_THAT(reason("{}\n"), HasSubstr("10: a header ends with '}' and spaces"));
  EXPECT_THAT(reason(std::string("{} \0", 4)), HasSubstr("11: a header ends with '}' and spaces"));
  EXPECT_THAT(reason("{} {}"), HasSubstr("not JSON"));
  EXPECT_THAT(reason("{}}"), HasSubstr("not JSON"));
  EXPECT_THAT(reason("{/**/}"), HasSubstr("not JSON"));
  EXPECT_THAT(reason("{,}"), HasSubstr("not JSON"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 0) + ",}"), HasSubstr("not JSON"));
  EXPECT_THAT(reason("{\"a\":}"), HasSubstr("14: not JSON: the parser stopped after"));
}

TEST(SafetensorsHeader, RejectsDuplicateKeys) {
  EXPECT_THAT(reason("{" + bytes("a", 0, 1) + "," + bytes("a", 1, 2) + "}", 2),
              HasSubstr("the key \"a\" is there twice"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 1) + "," + bytes("\\u0061", 1, 2) + "}", 2),
              HasSubstr("the key \"a\" is there twice"));
  EXPECT_THAT(reason("{\"__metadata__\":{},\"__metadata__\":{}}"),
              HasSubstr("the key \"__metadata__\" is there twice"));
  EXPECT_THAT(reason("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"), HasSubstr("the key \"k\" is there twice"));
  for (const std::string field : {"\"dtype\":\"U8\"", "\"shape\":[0]", "\"data_offsets\":[0,0]"})
    EXPECT_THAT(reason_of_fields("\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]," + field),
                HasSubstr("is there twice"));
}

TEST(SafetensorsHeader, RejectsUnknownFields) {
  const std::string good = "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]";
  EXPECT_EQ(reason_of_fields(good), "");
  for (const char* const more :
       {",\"x\":1", ",\"x\":\"1\"", ",\"x\":[]", ",\"x\":{}", ",\"x\":null", ",\"x\":true", ",\"x\":1.5", ",\"x\":-1"})
    EXPECT_THAT(reason_of_fields(good + more), HasSubstr("tensor \"w\" has the field \"x\"; expected are \"dtype\""))
        << more;
  for (const char* const fields :
       {"", "\"dtype\":\"U8\",\"shape\":[0]", "\"dtype\":\"U8\",\"data_offsets\":[0,0]",
        "\"shape\":[0],\"data_offsets\":[0,0]", "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0]"})
    EXPECT_THAT(reason_of_fields(fields), HasSubstr("tensor \"w\" needs \"dtype\", \"shape\" and \"data_offsets\""));
  EXPECT_THAT(reason_of_fields("\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0,0]"),
              HasSubstr("more than 2 entries"));
  for (const char* const value : {"1", "\"x\"", "[]", "null", "true", "1.5"})
    EXPECT_THAT(reason("{\"w\":" + std::string(value) + "}"), HasSubstr("the object of \"w\" is expected")) << value;
  for (const char* const value : {"1", "{}", "[]", "null"})
    EXPECT_THAT(reason("{\"__metadata__\":{\"k\":" + std::string(value) + "}}"),
                HasSubstr("the string of metadata \"k\""))
        << value;
  EXPECT_THAT(reason("{\"__metadata__\":\"x\"}"), HasSubstr("the object of \"__metadata__\" is expected"));
}

TEST(SafetensorsHeader, AcceptsKnownDtypes) {
  for (const char* const name : {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
    EXPECT_EQ(reason_of_fields("\"dtype\":\"" + std::string(name) + "\",\"shape\":[0],\"data_offsets\":[0,0]"), "");
  EXPECT_THAT(reason_of_fields("\"dtype\":\"F99\""),
              HasSubstr("dtype of tensor \"w\" is \"F99\"; allowed is F64, F32, F16"));
  EXPECT_THAT(reason_of_fields("\"dtype\":\"f32\""), HasSubstr("allowed is F64"));
}

TEST(SafetensorsHeader, ShapeMustMatchNumBytes) {
  const auto of = [](const std::string& shape, std::uint64_t end) {
    return reason_of_fields(
        "\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[0," + std::to_string(end) + "]", end);
  };
  EXPECT_EQ(of("2,3", 24), "");
  EXPECT_EQ(of("", 4), "");
  EXPECT_THAT(of("2,3", 20), HasSubstr("tensor \"w\" has 20 bytes; its shape and dtype need 24"));
  EXPECT_THAT(of("2", 0), HasSubstr("tensor \"w\" has 0 bytes; its shape and dtype need 8"));
  EXPECT_THAT(of("-2", 8), HasSubstr("an integer of 0 or more is expected"));
  EXPECT_THAT(of("2.0", 8), HasSubstr("an integer of 0 or more is expected"));
  EXPECT_THAT(of("1e2", 8), HasSubstr("an integer of 0 or more is expected"));
  EXPECT_THAT(of("\"2\"", 8), HasSubstr("a string where an integer"));
  EXPECT_THAT(of("[2]", 8), HasSubstr("a list where an integer"));
  EXPECT_THAT(of("18446744073709551616", 8), HasSubstr("an integer of 0 or more is expected"));
  EXPECT_THAT(of("9223372036854775808", 8), HasSubstr("allowed is at most 2^63 - 1"));
  // Products that come out right modulo 2^64, and a 0 that hides the rest.
  EXPECT_THAT(of("4611686018427387904", 0), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(of("4294967296,4294967296", 0), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(of("0,4294967296,4294967296", 0), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(of("4611686018427387904,0", 0), HasSubstr("more than 2^63 bytes"));
  std::string many = "1";
  for (std::size_t i = 1; i < kMaxDimensions; ++i) many += ",1";
  EXPECT_EQ(of(many, 4), "");
  EXPECT_THAT(of(many + ",1", 4), HasSubstr("shape of tensor \"w\" has more than 64 entries"));
}

TEST(SafetensorsHeader, TensorsMustCoverTheData) {
  EXPECT_EQ(reason("{" + bytes("a", 2, 5) + "," + bytes("b", 0, 2) + "}", 5), "") << "in any order of the keys";
  EXPECT_THAT(reason("{" + bytes("a", 1, 3) + "}", 3),
              HasSubstr("tensor \"a\" begins at byte 1 of the data, after a hole from 0"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 2) + "," + bytes("b", 3, 4) + "}", 4),
              HasSubstr("\"b\" begins at byte 3 of the data, after a hole from 2"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 2) + "," + bytes("b", 1, 3) + "}", 3),
              HasSubstr("\"b\" begins at byte 1 of the data, inside the tensor before it"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 2) + "," + bytes("b", 0, 2) + "}", 2),
              HasSubstr("inside the tensor before it"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 3) + "}", 2), HasSubstr("\"a\" ends at byte 3 of the data; the file holds 2"));
  EXPECT_THAT(reason("{" + bytes("a", 0, 3) + "}", 4), HasSubstr("1 bytes after the last tensor belong to none"));
  EXPECT_THAT(reason("{}", 1), HasSubstr("1 bytes after the last tensor belong to none"));
  EXPECT_THAT(reason_of_fields("\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,1]", 2),
              HasSubstr("ends at 1, before it begins at 2"));
  EXPECT_THAT(reason("{" + tensor("a", "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]") + "}"),
              HasSubstr("after a hole from 0"));
}

TEST(SafetensorsHeader, NamesMustBeShortUtf8) {
  EXPECT_EQ(reason("{" + bytes(std::string(kMaxNameBytes, 'n'), 0, 0) + "}"), "");
  EXPECT_THAT(reason("{" + bytes(std::string(kMaxNameBytes + 1, 'n'), 0, 0) + "}"),
              HasSubstr("a name of 1025 bytes; allowed is at most 1024"));
  for (const char* const bad : {"\xff", "\xc0\xaf", "\xed\xa0\x80", "\\ud800", "\\ud800x", "\\x", "\x01"})
    EXPECT_NE(reason("{" + bytes(bad, 0, 0) + "}"), "") << bad;
  EXPECT_EQ(reason("{" + bytes("\\ud83d\\ude00", 0, 0) + "}"), "");
}

TEST(SafetensorsHeader, LimitsDepthAndTokensBeforeAllocating) {
  EXPECT_THAT(reason("{\"a\":" + std::string(1'000'000, '[') + "}"),
              HasSubstr("20: nested deeper than the allowed 8 levels"));
  EXPECT_THAT(reason("{\"a\":{\"b\":{}}}"), HasSubstr("an object where tensor \"a\" has the field \"b\""));
  EXPECT_THAT(reason("{\"" + std::string(2 << 20, 'x') + "\":1}"),
              HasSubstr("9: a string or number of more than 1 MiB"));
  EXPECT_THAT(reason("{\"a\":" + std::string(2 << 20, '1') + "}"), HasSubstr("a string or number of more than 1 MiB"));
  std::string many = "{\"__metadata__\":{";
  for (int i = 0; i < 200'000; ++i) many += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  EXPECT_THAT(reason(many + "}}"), HasSubstr("describes more than fits into 12 MiB"));
  many = "{";
  for (int i = 0; i < 200'000; ++i) many += (i == 0 ? "" : ",") + bytes(std::to_string(i), 0, 0);
  EXPECT_LT(many.size(), kMaxHeaderBytes);
  EXPECT_THAT(reason(many + "}"), HasSubstr("describes more than fits into 12 MiB"));
}

TEST(SafetensorsHeader, TruncatedAndCorruptTextIsHandled) {
  const std::string good =
      "{\"__metadata__\":{\"k\":\"v\"}," + bytes("a", 0, 3) + "," + bytes("b\\u00e4", 3, 5) + "}  ";
  ASSERT_EQ(reason(good, 5), "");
  for (std::size_t cut = 0; cut + 2 < good.size(); ++cut) EXPECT_NE(reason(good.substr(0, cut), 5), "") << cut;
  for (std::size_t at = 0; at < good.size(); ++at)
    for (int byte = 0; byte < 256; ++byte) {
      auto changed = good;
      changed[at] = static_cast<char>(byte);
      try {
        const auto header = parse_header(changed, 5, "f");
        // What is taken must be sound: tensors that together are the 5 bytes.
        std::uint64_t sum = 0;
        for (const auto& [name, entry] : header.tensors) sum += entry.end - entry.begin;
        ASSERT_EQ(sum, 5u) << changed;
      } catch (const base::FormatError&) {
      }
    }
}

}  // namespace
}  // namespace lockstep::checkpoint
