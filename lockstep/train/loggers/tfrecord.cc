#include "lockstep/train/loggers/tfrecord.h"

#include <array>
#include <bit>
#include <cstring>

namespace lockstep::train {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kCastagnoli = 0x82F63B78;  // bits turned round
constexpr std::uint32_t kMaskDelta = 0xA282EAD8;
enum Wire { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t rest = i;
    for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? rest >> 1 ^ kCastagnoli : rest >> 1;
    table[i] = rest;
  }
  return table;
}
constexpr auto kTable = crc_table();

template <typename Number>
std::string as_bytes(Number number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::string masked_crc(std::string_view bytes) { return as_bytes(std::rotr(crc32c(bytes), 15) + kMaskDelta); }

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t rest = ~std::uint32_t{0};
  for (const char byte : bytes) rest = rest >> 8 ^ kTable[(rest ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~rest;
}

std::string event_record(std::string_view message) {
  const std::string length = as_bytes(static_cast<std::uint64_t>(message.size()));
  return length + masked_crc(length) + std::string(message) + masked_crc(message);
}

void Message::varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(value | 0x80);
  text_ += static_cast<char>(value);
}

template <typename Number>
void Message::raw(Number value) {
  text_ += as_bytes(value);
}

Message& Message::number(int field, std::uint64_t value) {
  key(field, kVarint);
  varint(value);
  return *this;
}

Message& Message::float32(int field, float value) {
  key(field, kFixed32);
  raw(value);
  return *this;
}

Message& Message::float64(int field, double value) {
  key(field, kFixed64);
  raw(value);
  return *this;
}

Message& Message::bytes(int field, std::string_view value) {
  key(field, kLength);
  varint(value.size());
  text_ += value;
  return *this;
}

Message& Message::float64s(int field, const std::vector<double>& values) {
  key(field, kLength);
  varint(values.size() * sizeof(double));
  for (const double value : values) raw(value);
  return *this;
}

}  // namespace lockstep::train
