// Text from users, made fit for files of others.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::train {

/// What is no UTF-8 becomes U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

/// As the content or an attribute of an element of HTML or XML: & < > " ' escaped, what XML has no place for left out,
/// and valid UTF-8.
std::string escape_xml(std::string_view text);

}  // namespace lockstep::train
