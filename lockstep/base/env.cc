#include "lockstep/base/env.h"

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::base {

std::optional<int> device_index(std::string_view text) {
  if (text == "auto" || text == "cpu" || text == "cuda") return -1;
  const auto index = text.starts_with("cuda:") ? parse_int(text.substr(5)) : std::nullopt;
  return index && *index >= 0 && *index <= 127 ? std::optional<int>(static_cast<int>(*index)) : std::nullopt;
}

void EnvReader::check() const {
  if (!error_.empty()) throw UsageError(error_);
}

void EnvReader::refuse(const char* name, const std::string& value, const std::string& expected) {
  if (error_.empty()) error_ = std::string(name) + " is " + quoted(value, 80) + "; expected " + expected;
}

EnvReader::Value EnvReader::text(const char* name) {
  if (std::string_view(name).starts_with("LOCKSTEP_")) lockstep_names_.emplace_back(name);
  Value value = lookup_ ? lookup_(name) : std::nullopt;
  return value && !value->empty() ? value : std::nullopt;
}

EnvReader::Value EnvReader::one_of(const char* name, std::span<const char* const> values) {
  Value value = text(name);
  if (!value || std::find(values.begin(), values.end(), *value) != values.end()) return value;
  refuse(name, *value, alternatives({values.begin(), values.end()}));
  return std::nullopt;
}

EnvReader::Value EnvReader::device(const char* name) {
  Value value = text(name);
  if (!value || device_index(*value)) return value;
  refuse(name, *value, kDevices);
  return std::nullopt;
}

std::optional<bool> EnvReader::flag(const char* name, const std::array<const char*, 2>& values, std::string_view on) {
  const Value value = one_of(name, values);
  return value ? std::optional(*value == on) : std::nullopt;
}

std::optional<std::chrono::milliseconds> EnvReader::seconds(const char* name, Least least) {
  const Value value = text(name);
  if (!value) return std::nullopt;
  const auto number = parse_double(*value);
  const bool may_be_zero = least == Least::kNoLimit;
  if (number && *number >= 0 && (*number > 0 || may_be_zero) && *number <= 1e7)
    return std::chrono::milliseconds(static_cast<std::int64_t>(*number * 1000));
  refuse(name, *value,
         may_be_zero ? "seconds, from 0 (no limit) to 10000000" : "seconds, more than 0 and at most 10000000");
  return std::nullopt;
}

std::optional<std::chrono::seconds> EnvReader::whole_seconds(const char* name, int low, int high) {
  const Value value = text(name);
  if (!value) return std::nullopt;
  const auto number = parse_int(*value);
  if (number && *number >= low && *number <= high) return std::chrono::seconds(*number);
  refuse(name, *value, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
  return std::nullopt;
}

const Env& Env::this_process() {
  static const Env env([](const char* name) -> Value {
    const char* value = std::getenv(name);
    return value ? Value(value) : std::nullopt;
  });
  return env;
}

std::optional<ProfileRequest> profile_request() {
  const auto& text = Env::this_process().lockstep_profile;
  if (!text) return std::nullopt;
  const std::size_t colon = text->find(':');
  const auto steps = parse_int(text->substr(0, colon));
  if (colon == std::string::npos || !steps || *steps < 1 || *steps > 100000)
    throw UsageError("LOCKSTEP_PROFILE is " + quoted(*text, 80) + "; expected what lockstep plan sets, STEPS:FOLDER");
  return ProfileRequest{static_cast<int>(*steps), text->substr(colon + 1)};
}

}  // namespace lockstep::base
