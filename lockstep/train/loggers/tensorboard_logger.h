// Event files for TensorBoard.
#pragma once

#include <optional>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::train {

class ProtoMessage;

/// A file of its own for each run in a folder, events.out.tfevents.TIME.HOST.PID.N, which is how TensorBoard wants it:
/// it shows all of them as one. Numbers are float32 there, as from Python. NaN and the infinities are numbers like
/// others. Histograms show what is finite; the count of what is not is the number NAME/not_finite, when there is some.
class TensorBoardLogger final : public Logger {
 public:
  /// With `first_step` TensorBoard is told to forget what earlier files say of this step and later ones. Touches
  /// nothing yet.
  TensorBoardLogger(const std::string& folder, std::optional<std::int64_t> first_step);

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void text(const LogTimestamp& at, const std::string& name, const std::string& text) override;
  void histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) override;
  void image(const LogTimestamp& at, const std::string& name, const Image& image) override;
  void flush() override;

 private:
  void write(const LogTimestamp& at, const ProtoMessage& summary);
  void begin(const LogTimestamp& at);

  RecordFile file_;
  std::optional<std::int64_t> first_step_;
  bool has_header_ = false;
};

}  // namespace lockstep::train
