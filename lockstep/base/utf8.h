// UTF-8 validation according to RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <string_view>

namespace lockstep::base {

/// Returns the length in bytes, 1 to 4, of the character at the beginning of `text`; 0 if it is not valid.
std::size_t utf8_length(std::string_view text);

/// Returns whether all of `text` is valid UTF-8.
bool is_utf8(std::string_view text);

}  // namespace lockstep::base
