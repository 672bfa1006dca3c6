#include "lockstep/train/loggers/tensorboard_logger.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <ctime>

#include "lockstep/train/loggers/text_escaping.h"

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

// Field numbers of event.proto, summary.proto and tensor.proto, by message.
namespace event {
enum { kTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
}
namespace session_log {
enum { kStatus = 1 };
enum { kStart = 1 };
}  // namespace session_log
namespace summary {
enum { kValue = 1 };
}
namespace value {
enum { kTag = 1, kSimple = 2, kImage = 4, kHistogram = 5, kTensor = 8, kMetadata = 9 };
}
namespace image {
enum { kHeight = 1, kWidth = 2, kChannels = 3, kEncoded = 4 };
}
namespace histogram_proto {
enum { kMin = 1, kMax = 2, kNum = 3, kSum = 4, kSumSquares = 5, kLimits = 6, kCounts = 7 };
}
namespace metadata {
enum { kPlugin = 1 };
}
namespace plugin {
enum { kName = 1 };
}
namespace tensor {
enum { kType = 1, kShape = 2, kStrings = 8 };
enum { kString = 7 };
}  // namespace tensor
namespace shape {
enum { kDim = 2 };
}
namespace dim {
enum { kSize = 1 };
}

/// A counter makes the names unique for loggers of one process within a second.
std::string event_file_name() {
  static std::atomic<int> count = 0;
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  return "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." + host + "." + std::to_string(::getpid()) +
         "." + std::to_string(count++);
}

ProtoMessage make_value(const std::string& name) {
  return std::move(ProtoMessage().add_bytes(value::kTag, replace_invalid_utf8(name)));
}
ProtoMessage make_summary(const ProtoMessage& one) {
  return std::move(ProtoMessage().add_message(summary::kValue, one));
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

TensorBoardLogger::TensorBoardLogger(const std::string& folder, std::optional<std::int64_t> first_step)
    : file_(folder + "/" + event_file_name()), first_step_(first_step) {}

void TensorBoardLogger::write_header(const LogTimestamp& at) {
  const auto event_at = [&](std::int64_t step) {
    return std::move(
        ProtoMessage().add_double(event::kTime, at.seconds).add_varint(event::kStep, static_cast<std::uint64_t>(step)));
  };
  std::string header = encode_tfrecord(event_at(0).add_bytes(event::kFileVersion, "brain.Event:2").serialized());
  if (first_step_)
    header += encode_tfrecord(
        event_at(*first_step_)
            .add_message(event::kSessionLog, ProtoMessage().add_varint(session_log::kStatus, session_log::kStart))
            .serialized());
  file_.append(header);
  file_.flush();  // a file without its header is invalid, so the header is written before anything else
  has_header_ = true;
}

void TensorBoardLogger::write(const LogTimestamp& at, const ProtoMessage& summary) {
  if (!has_header_) write_header(at);
  file_.append(encode_tfrecord(ProtoMessage()
                                   .add_double(event::kTime, at.seconds)
                                   .add_varint(event::kStep, static_cast<std::uint64_t>(at.step))
                                   .add_message(event::kSummary, summary)
                                   .serialized()));
}

void TensorBoardLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
  ProtoMessage all;
  for (const auto& [name, number] : values)
    all.add_message(summary::kValue, make_value(name).add_float(value::kSimple, static_cast<float>(number)));
  write(at, all);
}

void TensorBoardLogger::log_text(const LogTimestamp& at, const std::string& name, const std::string& text) {
  const ProtoMessage kind =
      std::move(ProtoMessage().add_message(metadata::kPlugin, ProtoMessage().add_bytes(plugin::kName, "text")));
  const ProtoMessage one = std::move(ProtoMessage().add_message(shape::kDim, ProtoMessage().add_varint(dim::kSize, 1)));
  const ProtoMessage strings = std::move(ProtoMessage()
                                             .add_varint(tensor::kType, tensor::kString)
                                             .add_message(tensor::kShape, one)
                                             .add_bytes(tensor::kStrings, replace_invalid_utf8(text)));
  write(at, make_summary(make_value(name).add_message(value::kTensor, strings).add_message(value::kMetadata, kind)));
}

void TensorBoardLogger::log_histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) {
  const ProtoMessage numbers =
      std::move(ProtoMessage()
                    .add_double(histogram_proto::kMin, histogram.min)
                    .add_double(histogram_proto::kMax, histogram.max)
                    .add_double(histogram_proto::kNum, static_cast<double>(histogram.num_finite))
                    .add_double(histogram_proto::kSum, histogram.sum)
                    .add_double(histogram_proto::kSumSquares, histogram.sum_squares)
                    .add_doubles(histogram_proto::kLimits, histogram.limits)
                    .add_doubles(histogram_proto::kCounts, {histogram.counts.begin(), histogram.counts.end()}));
  if (histogram.num_finite > 0) write(at, make_summary(make_value(name).add_message(value::kHistogram, numbers)));
  const std::int64_t others = histogram.num_nan + histogram.num_infinite;
  if (others > 0) log_scalars(at, {{name + "/not_finite", static_cast<double>(others)}});
}

void TensorBoardLogger::log_image(const LogTimestamp& at, const std::string& name, const Image& image) {
  const auto number = [](int count) { return static_cast<std::uint64_t>(count); };
  const ProtoMessage pixels = std::move(ProtoMessage()
                                            .add_varint(image::kHeight, number(image.height))
                                            .add_varint(image::kWidth, number(image.width))
                                            .add_varint(image::kChannels, number(image.channels))
                                            .add_bytes(image::kEncoded, encode_png(image)));
  write(at, make_summary(make_value(name).add_message(value::kImage, pixels)));
}

void TensorBoardLogger::flush() { file_.flush(); }

}  // namespace lockstep::training::inline loggers
