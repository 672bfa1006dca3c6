// Suggests the name that was probably meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::cli {

/// Returns "; did you mean NAME?" for the most similar of `known`, or "" if none is similar: if more than a third of
/// the word, or more than three characters, would have to change (Levenshtein distance). Pure.
std::string suggestion(std::string_view word, const std::vector<std::string>& known);

}  // namespace lockstep::launcher::cli
