#include "lockstep/train/loggers/logger_collection.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/train/loggers/csv_logger.h"
#include "lockstep/train/loggers/json_logger.h"
#include "lockstep/train/loggers/tensorboard_logger.h"

namespace lockstep::training::inline loggers {
namespace {

constexpr std::array<std::string_view, 4> kReservedNames = {"step", "time", "text", "histogram"};

void require(const LoggerOptions& options) {
  if (options.directory.empty() && (options.csv || options.json_lines || options.tensorboard))
    throw base::UsageError("LoggerOptions.directory is empty; expected the path of a directory, such as runs/NAME");
  if (options.flush_interval.count() < 0)
    throw base::UsageError("LoggerOptions.flush_interval is " + std::to_string(options.flush_interval.count()) +
                           " ms; expected 0 or more");
  if (options.first_step && *options.first_step < 0)
    throw base::UsageError("LoggerOptions.first_step is " + std::to_string(*options.first_step) +
                           "; expected 0 or more");
}

void require(std::int64_t step, const std::string& name) {
  if (step < 0)
    throw base::UsageError("LoggerCollection: the step of \"" + name + "\" is " + std::to_string(step) +
                           "; expected 0 or more");
  if (name.empty() || std::find(kReservedNames.begin(), kReservedNames.end(), name) != kReservedNames.end())
    throw base::UsageError("LoggerCollection: the name of a value is \"" + name +
                           "\"; expected a name that is not empty and not step, time, text or histogram");
}

}  // namespace

LoggerCollection::LoggerCollection(int rank, const LoggerOptions& options)
    : options_(options), rank_(rank), flushed_at_(std::chrono::steady_clock::now()) {
  require(options);
  const std::string& folder = options.directory;
  if (options.csv) add(std::make_unique<CsvLogger>(folder + "/metrics.csv", options.first_step));
  if (options.json_lines) add(std::make_unique<JsonLogger>(folder + "/metrics.jsonl", options.first_step));
  if (options.tensorboard) add(std::make_unique<TensorBoardLogger>(folder, options.first_step));
}

LoggerCollection::~LoggerCollection() {
  options_.on_disk_error = DiskErrorPolicy::kContinue;
  try {
    flush();
  } catch (const std::exception& error) {
    base::log_warning(error.what());
  }
}

bool LoggerCollection::call_logger(LoggerState& entry, const std::function<void(Logger&)>& action) {
  try {
    action(*entry.logger);
    return true;
  } catch (const base::SystemError& error) {
    if (options_.on_disk_error == DiskErrorPolicy::kStop) throw;
    if (entry.failures++ == 0) base::log_warning(std::string(error.what()) + "; the training continues without them");
    return false;
  }
}

void LoggerCollection::write(std::int64_t step, const std::string& name,
                             const std::function<void(Logger&, const LogTimestamp&)>& write_to) {
  if (!is_active()) return;
  require(step, name);
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  const LogTimestamp at{step, now.count()};
  for (LoggerState& entry : loggers_)
    entry.wrote_since_failure = call_logger(entry, [&](Logger& logger) { write_to(logger, at); });
  if (std::chrono::steady_clock::now() - flushed_at_ >= options_.flush_interval) flush_all();
}

void LoggerCollection::flush_all() {
  flushed_at_ = std::chrono::steady_clock::now();
  for (LoggerState& entry : loggers_) {
    entry.wrote_since_failure &= call_logger(entry, [](Logger& logger) { logger.flush(); });
    if (entry.failures == 0 || !entry.wrote_since_failure) continue;
    base::log_warning("logging works again after " + std::to_string(entry.failures) +
                      (entry.failures == 1 ? " failure" : " failures"));
    entry.failures = 0;
  }
}

void LoggerCollection::flush() {
  if (is_active()) flush_all();
}

void LoggerCollection::log_scalars(std::int64_t step, const NamedValues& values) {
  if (values.empty()) return;
  for (std::size_t i = 0; i < values.size(); ++i) {
    require(step, values[i].first);
    const auto same = [&](const auto& other) { return other.first == values[i].first; };
    if (std::any_of(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(i), same))
      throw base::UsageError("LoggerCollection: the name \"" + values[i].first +
                             "\" occurs twice in one call at step " + std::to_string(step) + "; expected unique names");
  }
  write(step, values.front().first, [&](Logger& logger, const LogTimestamp& at) { logger.log_scalars(at, values); });
}

void LoggerCollection::log_text(std::int64_t step, const std::string& name, const std::string& text) {
  write(step, name, [&](Logger& logger, const LogTimestamp& at) { logger.log_text(at, name, text); });
}

void LoggerCollection::log_histogram(std::int64_t step, const std::string& name, const Histogram& histogram) {
  write(step, name, [&](Logger& logger, const LogTimestamp& at) { logger.log_histogram(at, name, histogram); });
}

void LoggerCollection::log_image(std::int64_t step, const std::string& name, const Image& image) {
  write(step, name, [&](Logger& logger, const LogTimestamp& at) { logger.log_image(at, name, image); });
}

}  // namespace lockstep::training::inline loggers
