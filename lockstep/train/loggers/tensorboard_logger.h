// A logger that writes TensorBoard event files, and the encoding of their records.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::training::inline loggers {

/// CRC-32C (Castagnoli), as in RFC 3720: crc32c("123456789") is 0xE3069283.
std::uint32_t crc32c(std::string_view bytes);

/// Encodes one record of a TFRecord file: the length, its checksum, the message, its checksum. The checksums are masked
/// (rotated and offset), as the format requires, because the CRC of data that contains its own CRC is degenerate.
std::string encode_tfrecord(std::string_view message);

/// Writes a new file events.out.tfevents.TIME.HOST.PID.N for each logger; TensorBoard merges the files of a directory.
/// Scalars are float32, as from Python, including NaN and infinities. Histograms contain the finite values; the number
/// of other values, if any, is logged as the scalar NAME/not_finite.
class TensorBoardLogger final : public Logger {
 public:
  /// With `first_step`, a SessionLog event makes TensorBoard discard data of this step and later from earlier files.
  /// The constructor does not access the file system.
  TensorBoardLogger(const std::string& folder, std::optional<std::int64_t> first_step);

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void log_text(const LogTimestamp& at, const std::string& name, const std::string& text) override;
  void log_histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) override;
  void log_image(const LogTimestamp& at, const std::string& name, const Image& image) override;
  void flush() override;

 private:
  void write(const LogTimestamp& at, const std::string& summary);
  void write_header(const LogTimestamp& at);

  RecordFile file_;
  std::optional<std::int64_t> first_step_;
  bool has_header_ = false;
};

}  // namespace lockstep::training::inline loggers
