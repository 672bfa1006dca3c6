// JSON that was written by us, and may have come to harm since.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

/// The whole of `text`: at most kMaxJsonBytes of it, at most `max_depth` lists and objects inside each other, no key of
/// an object twice. Throws FormatError "FILE:OFFSET: reason".
nlohmann::json parse_json(std::string_view text, std::size_t max_depth, const std::string& file);

}  // namespace lockstep::checkpoint
