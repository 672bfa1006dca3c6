#include "lockstep/train/loggers/tensorboard_logger.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <ctime>

#include "lockstep/train/loggers/text_format.h"

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

// Field numbers of event.proto, summary.proto and tensor.proto, and two values of enums there.
enum { kEventTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5, kEventSessionLog = 7 };
enum { kSessionLogStatus = 1, kSessionStart = 1 };
enum { kSummaryValue = 1 };
enum { kValueTag = 1, kValueSimple = 2, kValueImage = 4, kValueHistogram = 5, kValueTensor = 8, kValueMetadata = 9 };
enum { kImageHeight = 1, kImageWidth = 2, kImageChannels = 3, kImageEncoded = 4 };
enum { kHistoMin = 1, kHistoMax, kHistoNum, kHistoSum, kHistoSumSquares, kHistoLimits, kHistoCounts };
enum { kMetadataPlugin = 1, kPluginName = 1 };
enum { kTensorType = 1, kTensorShape = 2, kTensorStrings = 8, kShapeDim = 2, kDimSize = 1, kTypeString = 7 };

// A protobuf message is the concatenation of its fields, which the following functions encode.

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
std::string tag(int field, int wire_type) { return varint(static_cast<std::uint64_t>(field << 3 | wire_type)); }

std::string varint_field(int field, std::int64_t value) {  // int32, int64, enum
  return tag(field, kVarint) + varint(static_cast<std::uint64_t>(value));
}
std::string float_field(int field, float value) { return tag(field, kFixed32) + to_bytes(value); }
std::string double_field(int field, double value) { return tag(field, kFixed64) + to_bytes(value); }
std::string bytes_field(int field, std::string_view value) {  // string, bytes, or a message
  return (tag(field, kLengthDelimited) + varint(value.size())).append(value);
}
template <typename Number>
std::string doubles_field(int field, const std::vector<Number>& values) {
  std::string bytes;
  for (const Number value : values) bytes += to_bytes(static_cast<double>(value));
  return bytes_field(field, bytes);
}

/// One value of a summary.
std::string named_value(const std::string& name, const std::string& value) {
  return bytes_field(kSummaryValue, bytes_field(kValueTag, replace_invalid_utf8(name)) + value);
}

std::string event_record(double seconds, std::int64_t step, const std::string& content) {
  return encode_tfrecord(double_field(kEventTime, seconds) + varint_field(kEventStep, step) + content);
}

/// A counter makes the names unique for loggers of one process within a second.
std::string event_file_name() {
  static std::atomic<int> count = 0;
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  return "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." + host + "." + std::to_string(::getpid()) +
         "." + std::to_string(count++);
}

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

TensorBoardLogger::TensorBoardLogger(const std::string& folder, std::optional<std::int64_t> first_step)
    : file_(folder + "/" + event_file_name()), first_step_(first_step) {}

void TensorBoardLogger::write_header(const LogTimestamp& at) {
  std::string header = event_record(at.seconds, 0, bytes_field(kEventFileVersion, "brain.Event:2"));
  if (first_step_)
    header += event_record(at.seconds, *first_step_,
                           bytes_field(kEventSessionLog, varint_field(kSessionLogStatus, kSessionStart)));
  file_.append(header);
  file_.flush();  // a file without its header is invalid, so the header is written before anything else
  has_header_ = true;
}

void TensorBoardLogger::write(const LogTimestamp& at, const std::string& summary) {
  if (!has_header_) write_header(at);
  file_.append(event_record(at.seconds, at.step, bytes_field(kEventSummary, summary)));
}

void TensorBoardLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
  std::string summary;
  for (const auto& [name, number] : values)
    summary += named_value(name, float_field(kValueSimple, static_cast<float>(number)));
  write(at, summary);
}

void TensorBoardLogger::log_text(const LogTimestamp& at, const std::string& name, const std::string& text) {
  const std::string strings = varint_field(kTensorType, kTypeString) +
                              bytes_field(kTensorShape, bytes_field(kShapeDim, varint_field(kDimSize, 1))) +
                              bytes_field(kTensorStrings, replace_invalid_utf8(text));
  const std::string kind = bytes_field(kMetadataPlugin, bytes_field(kPluginName, "text"));
  write(at, named_value(name, bytes_field(kValueTensor, strings) + bytes_field(kValueMetadata, kind)));
}

void TensorBoardLogger::log_histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) {
  if (histogram.num_finite > 0)
    write(at, named_value(name,
                          bytes_field(kValueHistogram,
                                      double_field(kHistoMin, histogram.min) + double_field(kHistoMax, histogram.max) +
                                          double_field(kHistoNum, static_cast<double>(histogram.num_finite)) +
                                          double_field(kHistoSum, histogram.sum) +
                                          double_field(kHistoSumSquares, histogram.sum_squares) +
                                          doubles_field(kHistoLimits, histogram.limits) +
                                          doubles_field(kHistoCounts, histogram.counts))));
  const std::int64_t others = histogram.num_nan + histogram.num_infinite;
  if (others > 0) log_scalars(at, {{name + "/not_finite", static_cast<double>(others)}});
}

void TensorBoardLogger::log_image(const LogTimestamp& at, const std::string& name, const Image& image) {
  const std::string pixels = varint_field(kImageHeight, image.height) + varint_field(kImageWidth, image.width) +
                             varint_field(kImageChannels, image.channels) +
                             bytes_field(kImageEncoded, encode_png(image));
  write(at, named_value(name, bytes_field(kValueImage, pixels)));
}

void TensorBoardLogger::flush() { file_.flush(); }

}  // namespace lockstep::training::inline loggers
