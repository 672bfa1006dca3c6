#include "lockstep/base/content_hash.h"

#define XXH_INLINE_ALL
#define XXH_NO_INLINE_HINTS 1  // sanitizer builds do not honour always_inline
#include <xxhash.h>

#include <new>

#include "lockstep/base/parse.h"

namespace lockstep::base {

struct ContentHash::State {
  XXH3_state_t* handle = XXH3_createState();
  ~State() { XXH3_freeState(handle); }
};

ContentHash::ContentHash() : state_(std::make_unique<State>()) {
  if (!state_->handle) throw std::bad_alloc();
  XXH3_128bits_reset(state_->handle);
}

ContentHash::~ContentHash() = default;

void ContentHash::add(std::string_view bytes) { XXH3_128bits_update(state_->handle, bytes.data(), bytes.size()); }

std::string ContentHash::hex_digest() const {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state_->handle));
  return to_hex({reinterpret_cast<const char*>(bytes.digest), sizeof bytes.digest});
}

}  // namespace lockstep::base
