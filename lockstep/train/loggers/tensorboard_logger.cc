#include "lockstep/train/loggers/tensorboard_logger.h"

#include <unistd.h>

#include <atomic>
#include <ctime>

#include "lockstep/train/loggers/text_escaping.h"
#include "lockstep/train/loggers/tfrecord.h"

namespace lockstep::train {
namespace {

// Fields of event.proto, summary.proto and tensor.proto, by their messages.
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

/// Two loggers of a process and second have files of their own.
std::string event_file_name() {
  static std::atomic<int> count = 0;
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  return "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." + host + "." + std::to_string(::getpid()) +
         "." + std::to_string(count++);
}

ProtoMessage make_value(const std::string& name) {
  return std::move(ProtoMessage().bytes(value::kTag, replace_invalid_utf8(name)));
}
ProtoMessage make_summary(const ProtoMessage& one) { return std::move(ProtoMessage().message(summary::kValue, one)); }

}  // namespace

TensorBoardLogger::TensorBoardLogger(const std::string& folder, std::optional<std::int64_t> first_step)
    : file_(folder + "/" + event_file_name()), first_step_(first_step) {}

void TensorBoardLogger::begin(const LogTimestamp& at) {
  const auto event_at = [&](std::int64_t step) {
    return std::move(
        ProtoMessage().add_double(event::kTime, at.seconds).number(event::kStep, static_cast<std::uint64_t>(step)));
  };
  std::string head = event_record(event_at(0).bytes(event::kFileVersion, "brain.Event:2").text());
  if (first_step_)
    head +=
        event_record(event_at(*first_step_)
                         .message(event::kSessionLog, ProtoMessage().number(session_log::kStatus, session_log::kStart))
                         .text());
  file_.append(head);
  file_.flush();  // a file without a beginning is none: what comes is written when this is there
  has_header_ = true;
}

void TensorBoardLogger::write(const LogTimestamp& at, const ProtoMessage& summary) {
  if (!has_header_) begin(at);
  file_.append(event_record(ProtoMessage()
                                .add_double(event::kTime, at.seconds)
                                .number(event::kStep, static_cast<std::uint64_t>(at.step))
                                .message(event::kSummary, summary)
                                .text()));
}

void TensorBoardLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
  ProtoMessage all;
  for (const auto& [name, number] : values)
    all.message(summary::kValue, make_value(name).add_float(value::kSimple, static_cast<float>(number)));
  write(at, all);
}

void TensorBoardLogger::text(const LogTimestamp& at, const std::string& name, const std::string& text) {
  const ProtoMessage kind =
      std::move(ProtoMessage().message(metadata::kPlugin, ProtoMessage().bytes(plugin::kName, "text")));
  const ProtoMessage one = std::move(ProtoMessage().message(shape::kDim, ProtoMessage().number(dim::kSize, 1)));
  const ProtoMessage strings = std::move(ProtoMessage()
                                             .number(tensor::kType, tensor::kString)
                                             .message(tensor::kShape, one)
                                             .bytes(tensor::kStrings, replace_invalid_utf8(text)));
  write(at, make_summary(make_value(name).message(value::kTensor, strings).message(value::kMetadata, kind)));
}

void TensorBoardLogger::histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) {
  const ProtoMessage numbers =
      std::move(ProtoMessage()
                    .add_double(histogram_proto::kMin, histogram.min)
                    .add_double(histogram_proto::kMax, histogram.max)
                    .add_double(histogram_proto::kNum, static_cast<double>(histogram.num_finite))
                    .add_double(histogram_proto::kSum, histogram.sum)
                    .add_double(histogram_proto::kSumSquares, histogram.sum_squares)
                    .add_doubles(histogram_proto::kLimits, histogram.limits)
                    .add_doubles(histogram_proto::kCounts, {histogram.counts.begin(), histogram.counts.end()}));
  if (histogram.num_finite > 0) write(at, make_summary(make_value(name).message(value::kHistogram, numbers)));
  const std::int64_t others = histogram.num_nan + histogram.num_infinite;
  if (others > 0) log_scalars(at, {{name + "/not_finite", static_cast<double>(others)}});
}

void TensorBoardLogger::image(const LogTimestamp& at, const std::string& name, const Image& image) {
  const auto number = [](int count) { return static_cast<std::uint64_t>(count); };
  const ProtoMessage pixels = std::move(ProtoMessage()
                                            .number(image::kHeight, number(image.height))
                                            .number(image::kWidth, number(image.width))
                                            .number(image::kChannels, number(image.channels))
                                            .bytes(image::kEncoded, encode_png(image)));
  write(at, make_summary(make_value(name).message(value::kImage, pixels)));
}

void TensorBoardLogger::flush() { file_.flush(); }

}  // namespace lockstep::train
