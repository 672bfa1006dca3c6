// The memory that a sanitizer keeps in a process. Tests that bound a process's memory allow for it.
#pragma once

#include <cstddef>

namespace lockstep::tests {

/// Upper bound on freed bytes that still count as memory of the process.
#ifdef __SANITIZE_ADDRESS__
// The default of quarantine_size_mb.
inline constexpr std::size_t kSanitizerQuarantineBytes = std::size_t{256} << 20;
#else
inline constexpr std::size_t kSanitizerQuarantineBytes = 0;
#endif

}  // namespace lockstep::tests
