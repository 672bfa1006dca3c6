// Embeds the hash of a text in the text itself, so that a single flipped bit is detected.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/base/content_hash.h"

namespace lockstep::checkpoint::files {

/// The placeholder for the digits while the hash is computed.
inline constexpr std::size_t kHashDigits = base::ContentHash::kHexDigits;
inline const std::string kHashPlaceholder(kHashDigits, '0');

/// Replaces the kHashPlaceholder at offset `at` by the hash of `text`.
void embed_hash(std::string& text, std::size_t at);

/// Returns whether the hash at offset `at` is the one that embed_hash() computes for `text`.
bool is_hash_valid(std::string_view text, std::size_t at);

}  // namespace lockstep::checkpoint::files
