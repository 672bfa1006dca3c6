#include "bench/harness/statistics.h"

#include <algorithm>
#include <cstdio>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::bench {
namespace {

constexpr std::size_t kMaxSize = 1ULL << 30;

double quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

std::vector<double> medians(const Rounds& rounds) {
  std::vector<double> all;
  for (const auto& round : rounds) all.push_back(median(round));
  return all;
}

std::size_t unit_of(char suffix) {
  return suffix == 'G' ? 1 << 30 : suffix == 'M' ? 1 << 20 : suffix == 'K' ? 1 << 10 : 1;
}

}  // namespace

double median(std::vector<double> values) {
  LOCKSTEP_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  return quantile(values, 0.5);
}

double spread(std::vector<double> values) {
  if (values.size() < 4) return 0;
  std::sort(values.begin(), values.end());
  return (quantile(values, 0.75) - quantile(values, 0.25)) / quantile(values, 0.5);
}

TimingSummary summarize(const Rounds& rounds) {
  std::vector<double> all;
  for (const auto& round : rounds) all.insert(all.end(), round.begin(), round.end());
  return {median(all), *std::min_element(all.begin(), all.end()), static_cast<int>(all.size()),
          spread(medians(rounds))};
}

double ratio(const Rounds& own, const Rounds& base) {
  LOCKSTEP_CHECK(own.size() == base.size());
  std::vector<double> ratios;
  for (std::size_t i = 0; i < own.size(); ++i) ratios.push_back(median(own[i]) / median(base[i]));
  return median(ratios);
}

std::size_t parse_size(const std::string& text) {
  const std::size_t unit = text.empty() ? 1 : unit_of(text.back());
  const auto number = base::parse_int(unit == 1 ? text : text.substr(0, text.size() - 1));
  if (!number || *number <= 0 || static_cast<std::size_t>(*number) > kMaxSize / unit ||
      static_cast<std::size_t>(*number) * unit % 4 != 0)
    throw base::UsageError("--size has " + base::quoted(text, 80) +
                           "; expected a multiple of 4 bytes from 4 to 1G, such as 8, 4K or 250M");
  return static_cast<std::size_t>(*number) * unit;
}

std::string size_text(std::size_t bytes) {
  for (const char suffix : {'G', 'M', 'K'})
    if (bytes % unit_of(suffix) == 0) return std::to_string(bytes / unit_of(suffix)) + suffix;
  return std::to_string(bytes);
}

std::string time_text(double seconds) {
  const char* unit = "s";
  for (const char* smaller : {"ms", "us"}) {
    if (seconds >= 1) break;
    seconds *= 1000;
    unit = smaller;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %s", seconds < 10 ? 2 : seconds < 100 ? 1 : 0, seconds, unit);
  return text;
}

}  // namespace lockstep::bench
