#include "lockstep/train/loggers/tensorboard_logger.h"

#include <unistd.h>

#include <atomic>
#include <ctime>

#include "lockstep/train/loggers/tfrecord.h"
#include "lockstep/train/loggers/text_escaping.h"

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
std::string file_name() {
  static std::atomic<int> count = 0;
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  return "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." + host + "." + std::to_string(::getpid()) +
         "." + std::to_string(count++);
}

Message value_named(const std::string& name) { return std::move(Message().bytes(value::kTag, valid_utf8(name))); }
Message summary_of(const Message& one) { return std::move(Message().message(summary::kValue, one)); }

}  // namespace

TensorBoardLogger::TensorBoardLogger(const std::string& folder, std::optional<std::int64_t> first_step)
    : file_(folder + "/" + file_name()), first_step_(first_step) {}

void TensorBoardLogger::begin(const Moment& at) {
  const auto event_at = [&](std::int64_t step) {
    return std::move(
        Message().float64(event::kTime, at.seconds).number(event::kStep, static_cast<std::uint64_t>(step)));
  };
  std::string head = event_record(event_at(0).bytes(event::kFileVersion, "brain.Event:2").text());
  if (first_step_)
    head += event_record(event_at(*first_step_)
                             .message(event::kSessionLog, Message().number(session_log::kStatus, session_log::kStart))
                             .text());
  file_.append(head);
  file_.flush();  // a file without a beginning is none: what comes is written when this is there
  begun_ = true;
}

void TensorBoardLogger::write(const Moment& at, const Message& summary) {
  if (!begun_) begin(at);
  file_.append(event_record(Message()
                                .float64(event::kTime, at.seconds)
                                .number(event::kStep, static_cast<std::uint64_t>(at.step))
                                .message(event::kSummary, summary)
                                .text()));
}

void TensorBoardLogger::scalars(const Moment& at, const NamedValues& values) {
  Message all;
  for (const auto& [name, number] : values)
    all.message(summary::kValue, value_named(name).float32(value::kSimple, static_cast<float>(number)));
  write(at, all);
}

void TensorBoardLogger::text(const Moment& at, const std::string& name, const std::string& text) {
  const Message kind = std::move(Message().message(metadata::kPlugin, Message().bytes(plugin::kName, "text")));
  const Message one = std::move(Message().message(shape::kDim, Message().number(dim::kSize, 1)));
  const Message strings = std::move(Message()
                                        .number(tensor::kType, tensor::kString)
                                        .message(tensor::kShape, one)
                                        .bytes(tensor::kStrings, valid_utf8(text)));
  write(at, summary_of(value_named(name).message(value::kTensor, strings).message(value::kMetadata, kind)));
}

void TensorBoardLogger::histogram(const Moment& at, const std::string& name, const Histogram& histogram) {
  const Message numbers =
      std::move(Message()
                    .float64(histogram_proto::kMin, histogram.min)
                    .float64(histogram_proto::kMax, histogram.max)
                    .float64(histogram_proto::kNum, static_cast<double>(histogram.num_finite))
                    .float64(histogram_proto::kSum, histogram.sum)
                    .float64(histogram_proto::kSumSquares, histogram.sum_squares)
                    .float64s(histogram_proto::kLimits, histogram.limits)
                    .float64s(histogram_proto::kCounts, {histogram.counts.begin(), histogram.counts.end()}));
  if (histogram.num_finite > 0) write(at, summary_of(value_named(name).message(value::kHistogram, numbers)));
  const std::int64_t others = histogram.num_nan + histogram.num_infinite;
  if (others > 0) scalars(at, {{name + "/not_finite", static_cast<double>(others)}});
}

void TensorBoardLogger::image(const Moment& at, const std::string& name, const Image& image) {
  const auto number = [](int count) { return static_cast<std::uint64_t>(count); };
  const Message pixels = std::move(Message()
                                       .number(image::kHeight, number(image.height))
                                       .number(image::kWidth, number(image.width))
                                       .number(image::kChannels, number(image.channels))
                                       .bytes(image::kEncoded, png_of(image)));
  write(at, summary_of(value_named(name).message(value::kImage, pixels)));
}

void TensorBoardLogger::flush() { file_.flush(); }

}  // namespace lockstep::train
