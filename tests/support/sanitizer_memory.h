/// Memory of a process that a sanitizer keeps: tests that bound a process's memory allow for it.
#pragma once

#include <cstddef>

namespace lockstep::tests {

/// Bytes that were freed and still count as the process's, at most.
#ifdef __SANITIZE_ADDRESS__
inline constexpr std::size_t kSanitizerQuarantineBytes = std::size_t{256}
                                                         << 20;  // quarantine_size_mb as it is without an option
#else
inline constexpr std::size_t kSanitizerQuarantineBytes = 0;
#endif

}  // namespace lockstep::tests
