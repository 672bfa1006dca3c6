#include "lockstep/checkpoint/files/embedded_hash.h"

namespace lockstep::checkpoint::files {
namespace {

std::string compute_hash(std::string_view text, std::size_t at) {
  base::ContentHash hash;
  hash.add(text.substr(0, at));
  hash.add(kHashPlaceholder);
  hash.add(text.substr(at + kHashDigits));
  return hash.hex_digest();
}

}  // namespace

void embed_hash(std::string& text, std::size_t at) { text.replace(at, kHashDigits, compute_hash(text, at)); }

bool is_hash_valid(std::string_view text, std::size_t at) {
  return text.size() >= at + kHashDigits && text.substr(at, kHashDigits) == compute_hash(text, at);
}

}  // namespace lockstep::checkpoint::files
