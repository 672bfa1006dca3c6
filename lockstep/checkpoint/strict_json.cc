#include "lockstep/checkpoint/strict_json.h"

#include <set>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint {

using nlohmann::json;

json parse_json(std::string_view text, std::size_t max_depth, const std::string& file) {
  const auto throw_format_error = [&](std::size_t at, const std::string& reason) {
    throw base::FormatError(file + ":" + std::to_string(at) + ": " + reason);
  };
  if (text.size() > files::kMaxJsonBytes)
    throw_format_error(
        0, std::to_string(text.size()) + " bytes of JSON; expected at most " + std::to_string(files::kMaxJsonBytes));
  std::vector<std::set<std::string>> keys;
  const auto on_event = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (static_cast<std::size_t>(depth) >= max_depth)
        throw_format_error(0, "nested deeper than the limit of " + std::to_string(max_depth) + " levels");
      keys.emplace_back();
    }
    if (event == json::parse_event_t::object_end || event == json::parse_event_t::array_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get_ref<const std::string&>()).second)
      throw_format_error(0, "duplicate key " + base::quoted(parsed.get_ref<const std::string&>(), 80));
    return true;
  };
  try {
    return json::parse(text, on_event);
  } catch (const json::parse_error& error) {
    throw_format_error(error.byte == 0 ? 0 : error.byte - 1, "invalid JSON");
  } catch (const json::exception&) {
    throw_format_error(0, "number out of range");  // 1e999
  }
  return {};
}

}  // namespace lockstep::checkpoint
