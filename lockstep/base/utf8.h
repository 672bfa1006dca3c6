// UTF-8 as RFC 3629 allows it: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <string_view>

namespace lockstep::base {

/// Bytes of the character at the beginning of `text`, 1 to 4; 0 when there is no valid one.
std::size_t utf8_length(std::string_view text);

/// Whether all of `text` is valid.
bool is_utf8(std::string_view text);

}  // namespace lockstep::base
