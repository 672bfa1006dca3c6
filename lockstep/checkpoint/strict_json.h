// Parses JSON that Lockstep wrote and that may have been damaged since.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

/// Parses all of `text`. Throws FormatError "FILE:OFFSET: reason" if it has more than kMaxJsonBytes, nests lists and
/// objects deeper than `max_depth`, or if an object contains a key twice.
nlohmann::json parse_json(std::string_view text, std::size_t max_depth, const std::string& file);

}  // namespace lockstep::checkpoint
