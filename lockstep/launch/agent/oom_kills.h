// Whether the kernel has killed for want of memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::launcher {

/// The number that the kernel counts in `text`, the content of memory.events, memory.oom_control or /proc/vmstat: its
/// line "oom_kill N"; 0 when there is none. Pure.
std::int64_t parse_oom_kills(std::string_view text);

/// The kills counted now for the cgroup of this process, or for the machine when the cgroup has no counter.
std::int64_t oom_kills();

}  // namespace lockstep::launcher
