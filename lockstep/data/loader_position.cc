#include "lockstep/data/loader_position.h"

#include <array>
#include <charconv>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::data {
namespace {

constexpr std::array<std::string_view, 5> kFields = {"seed=", "epoch=", "samples=", "num_samples=", "shuffle="};

[[noreturn]] void throw_usage_error(std::string_view text) {
  throw base::UsageError(
      "parse_position: the position is " + base::quoted(text, 200) +
      "; expected \"seed=N epoch=N samples=N num_samples=N shuffle=0|1\" with samples <= num_samples");
}

}  // namespace

std::string to_text(const LoaderPosition& position) {
  return "seed=" + std::to_string(position.seed) + " epoch=" + std::to_string(position.epoch) +
         " samples=" + std::to_string(position.samples_drawn) + " num_samples=" + std::to_string(position.num_samples) +
         " shuffle=" + (position.shuffle ? "1" : "0");
}

LoaderPosition parse_position(std::string_view text) {
  const auto fields = base::split(text, ' ');
  if (fields.size() != kFields.size()) throw_usage_error(text);
  std::array<std::uint64_t, kFields.size()> values{};
  for (std::size_t i = 0; i < kFields.size(); ++i) {
    const std::string_view field = fields[i];
    if (!field.starts_with(kFields[i])) throw_usage_error(text);
    const char* const last = field.data() + field.size();
    const auto [end, error] = std::from_chars(field.data() + kFields[i].size(), last, values[i]);
    if (error != std::errc() || end != last) throw_usage_error(text);
  }
  if (values[2] > values[3] || values[4] > 1) throw_usage_error(text);
  const LoaderPosition position{values[0], values[1], values[2], values[3], values[4] == 1};
  if (to_text(position) != text) throw_usage_error(text);  // rejects leading zeros
  return position;
}

}  // namespace lockstep::data
