// Tells the thread sanitizer of an order between threads that it cannot see, because a lock in a library that is not
// compiled with it gives the order. Without the sanitizer, these functions do nothing.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace lockstep::ddp {

/// What a thread did before released(address) happens before what a thread does after a later acquired(address).
inline void released([[maybe_unused]] void* address) noexcept {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(address);
#endif
}
inline void acquired([[maybe_unused]] void* address) noexcept {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(address);
#endif
}

}  // namespace lockstep::ddp
