// Counts out-of-memory kills by the kernel.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::launcher::agent {

/// Returns the number in the line "oom_kill N" of `text`, the content of memory.events, memory.oom_control or
/// /proc/vmstat; 0 if there is none. Pure.
std::int64_t parse_oom_kills(std::string_view text);

/// Returns the number of out-of-memory kills so far in this process's cgroup, or on the machine if the cgroup has no
/// counter.
std::int64_t count_oom_kills();

}  // namespace lockstep::launcher::agent
