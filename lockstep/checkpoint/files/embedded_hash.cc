#include "lockstep/checkpoint/files/embedded_hash.h"

namespace lockstep::checkpoint {
namespace {

std::string seal_of(std::string_view text, std::size_t at) {
  base::ContentHash hash;
  hash.add(text.substr(0, at));
  hash.add(kNoSeal);
  hash.add(text.substr(at + kSealBytes));
  return hash.digits();
}

}  // namespace

void seal(std::string& text, std::size_t at) { text.replace(at, kSealBytes, seal_of(text, at)); }

bool seal_holds(std::string_view text, std::size_t at) {
  return text.size() >= at + kSealBytes && text.substr(at, kSealBytes) == seal_of(text, at);
}

}  // namespace lockstep::checkpoint
