// Escaping of user text for other file formats.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::training::inline loggers {

/// Replaces each byte that is not valid UTF-8 by U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

/// Returns `text` as content or attribute value of HTML or XML: escapes & < > " ', removes characters that XML does not
/// allow, and replaces invalid UTF-8.
std::string escape_xml(std::string_view text);

}  // namespace lockstep::training::inline loggers
