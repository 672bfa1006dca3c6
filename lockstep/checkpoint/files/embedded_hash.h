// A text that carries the hash of itself, so that one flipped bit of it is noticed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/base/content_hash.h"

namespace lockstep::checkpoint {

/// What stands for the digits until they are known.
inline constexpr std::size_t kHashDigits = base::ContentHash::kHexDigits;
inline const std::string kHashPlaceholder(kHashDigits, '0');

/// Puts the hash of `text` into it, at `at`, where kHashPlaceholder stands.
void embed_hash(std::string& text, std::size_t at);

/// Whether seal() has made it as it is.
bool is_hash_valid(std::string_view text, std::size_t at);

}  // namespace lockstep::checkpoint
