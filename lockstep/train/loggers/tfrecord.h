// TensorBoard's event files, byte by byte: records with checksums, and the few messages of protobuf in them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::train {

/// CRC-32C (Castagnoli), as RFC 3720 has it: of "123456789" it is 0xE3069283.
std::uint32_t crc32c(std::string_view bytes);

/// One record of a TFRecord file: the length, its checksum, the bytes, theirs. Checksums are turned and moved, so that
/// one of bytes that hold a checksum is no special one.
std::string event_record(std::string_view message);

/// A message of protobuf as it grows. Numbers of fields are those of TensorFlow's event.proto, summary.proto and
/// tensor.proto.
class ProtoMessage {
 public:
  ProtoMessage& number(int field, std::uint64_t value);  // int32, int64, enum
  ProtoMessage& add_float(int field, float value);
  ProtoMessage& add_double(int field, double value);
  ProtoMessage& bytes(int field, std::string_view value);  // string, bytes, or a message
  ProtoMessage& message(int field, const ProtoMessage& value) { return bytes(field, value.serialized_); }
  ProtoMessage& add_doubles(int field, const std::vector<double>& values);  // packed
  const std::string& text() const { return serialized_; }

 private:
  void append_varint(std::uint64_t value);
  void append_tag(int field, int wire_type) {
    append_varint(static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire_type));
  }
  template <typename Number>
  void append_raw(Number value);
  std::string serialized_;
};

}  // namespace lockstep::train
