#include "lockstep/train/loggers/json_logger.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/base/parse.h"
#include "lockstep/train/loggers/text_format.h"

namespace lockstep::training::inline loggers {
namespace {

std::string json_number(double number) {
  if (std::isnan(number)) return "\"NaN\"";
  if (std::isinf(number)) return number > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  std::string text;
  append_number(text, number);
  return text;
}

bool is_at_or_after(const std::string& line, std::int64_t first_step) {
  const auto entry = nlohmann::json::parse(line, nullptr, false);
  const auto step = entry.is_object() ? entry.find("step") : entry.end();
  return step != entry.end() && step->is_number_integer() && step->get<std::int64_t>() >= first_step;
}

}  // namespace

std::string JsonLogger::line_prefix(const LogTimestamp& at) const {
  std::string line = "{\"step\":";
  append_number(line, at.step);
  line += ",\"time\":";
  append_seconds(line, at.seconds);
  return line;
}

void JsonLogger::write(std::string line) {
  if (!has_adopted_file_ && std::filesystem::exists(file_.path()))
    rewrite_lines(file_.path(), [&](std::string& old) {
      if (first_step_ && is_at_or_after(old, *first_step_)) old.clear();
    });
  has_adopted_file_ = true;
  file_.append(line.append("}\n"));
}

void JsonLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
  std::string line = line_prefix(at);
  for (const auto& [name, value] : values)
    line.append(",").append(json_string(name)).append(":").append(json_number(value));
  write(std::move(line));
}

void JsonLogger::log_text(const LogTimestamp& at, const std::string& name, const std::string& text) {
  write(line_prefix(at) + ",\"text\":{" + json_string(name) + ":" + json_string(text) + "}");
}

void JsonLogger::log_histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) {
  write(line_prefix(at) + ",\"histogram\":{" + json_string(name) + ":{\"min\":" + json_number(histogram.min) +
        ",\"max\":" + json_number(histogram.max) + ",\"sum\":" + json_number(histogram.sum) + ",\"sum_squares\":" +
        json_number(histogram.sum_squares) + ",\"finite\":" + std::to_string(histogram.num_finite) +
        ",\"nan\":" + std::to_string(histogram.num_nan) + ",\"infinite\":" + std::to_string(histogram.num_infinite) +
        ",\"limits\":[" + base::joined(histogram.limits, ",", json_number) + "],\"counts\":[" +
        base::joined(histogram.counts, ",") + "]}}");
}

}  // namespace lockstep::training::inline loggers
