// What tests must know of a sanitizer: it makes a program several times as slow and keeps memory.
#pragma once

#include <cstddef>

namespace lockstep::tests {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

/// Upper bound on freed bytes that still count as memory of the process.
#ifdef __SANITIZE_ADDRESS__
// The default of quarantine_size_mb.
inline constexpr std::size_t kSanitizerQuarantineBytes = std::size_t{256} << 20;
#else
inline constexpr std::size_t kSanitizerQuarantineBytes = 0;
#endif

}  // namespace lockstep::tests
