// Encoding of TFRecord files and of the protobuf messages in TensorBoard event files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::training::inline loggers {

/// CRC-32C (Castagnoli), as in RFC 3720: crc32c("123456789") is 0xE3069283.
std::uint32_t crc32c(std::string_view bytes);

/// Encodes one record of a TFRecord file: the length, its checksum, the message, its checksum. The checksums are masked
/// (rotated and offset), as the format requires, because the CRC of data that contains its own CRC is degenerate.
std::string encode_tfrecord(std::string_view message);

/// Builds one protobuf message. Field numbers are those of TensorFlow's event.proto, summary.proto and tensor.proto.
class ProtoMessage {
 public:
  ProtoMessage& add_varint(int field, std::uint64_t value);  // int32, int64, enum
  ProtoMessage& add_float(int field, float value);
  ProtoMessage& add_double(int field, double value);
  ProtoMessage& add_bytes(int field, std::string_view value);  // string, bytes, or a message
  ProtoMessage& add_message(int field, const ProtoMessage& value) { return add_bytes(field, value.serialized_); }
  ProtoMessage& add_doubles(int field, const std::vector<double>& values);  // packed
  const std::string& serialized() const { return serialized_; }

 private:
  void append_varint(std::uint64_t value);
  void append_tag(int field, int wire_type) {
    append_varint(static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire_type));
  }
  template <typename Number>
  void append_raw(Number value);
  std::string serialized_;
};

}  // namespace lockstep::training::inline loggers
