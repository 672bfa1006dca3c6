#include "lockstep/train/loggers/tfrecord.h"

#include <array>
#include <bit>
#include <cstring>

namespace lockstep::training::inline loggers {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kCastagnoli = 0x82F63B78;  // bit-reversed
constexpr std::uint32_t kMaskDelta = 0xA282EAD8;
enum WireType { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kCastagnoli : crc >> 1;
    table[i] = crc;
  }
  return table;
}
constexpr auto kCrcTable = crc_table();

template <typename Number>
std::string to_bytes(Number number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::string masked_crc32c(std::string_view bytes) { return to_bytes(std::rotr(crc32c(bytes), 15) + kMaskDelta); }

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~std::uint32_t{0};
  for (const char byte : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~crc;
}

std::string encode_tfrecord(std::string_view message) {
  const std::string length = to_bytes(static_cast<std::uint64_t>(message.size()));
  return length + masked_crc32c(length) + std::string(message) + masked_crc32c(message);
}

void ProtoMessage::append_varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) serialized_ += static_cast<char>(value | 0x80);
  serialized_ += static_cast<char>(value);
}

template <typename Number>
void ProtoMessage::append_raw(Number value) {
  serialized_ += to_bytes(value);
}

ProtoMessage& ProtoMessage::add_varint(int field, std::uint64_t value) {
  append_tag(field, kVarint);
  append_varint(value);
  return *this;
}

ProtoMessage& ProtoMessage::add_float(int field, float value) {
  append_tag(field, kFixed32);
  append_raw(value);
  return *this;
}

ProtoMessage& ProtoMessage::add_double(int field, double value) {
  append_tag(field, kFixed64);
  append_raw(value);
  return *this;
}

ProtoMessage& ProtoMessage::add_bytes(int field, std::string_view value) {
  append_tag(field, kLengthDelimited);
  append_varint(value.size());
  serialized_ += value;
  return *this;
}

ProtoMessage& ProtoMessage::add_doubles(int field, const std::vector<double>& values) {
  append_tag(field, kLengthDelimited);
  append_varint(values.size() * sizeof(double));
  for (const double value : values) append_raw(value);
  return *this;
}

}  // namespace lockstep::training::inline loggers
