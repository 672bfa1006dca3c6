// The error of a process that gets no memory to share with other ranks.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/host_memory.h"

namespace lockstep::comm::arena {

/// Thrown when an allocation would exceed the memory of the host or of a control group, or the arena's own size or
/// limit, or when the kernel refuses memory. The cause is RESOURCE. what() names the request, the limit, where the
/// limit comes from, and what uses the memory.
class ArenaFull : public base::Error {
 public:
  explicit ArenaFull(const std::string& message, const std::string& hint = {})
      : Error(base::Cause::kResource, message, hint) {}
};

/// Returns how many ranks of this host map each other's arenas.
std::uint64_t ranks_on_host();
/// Returns how much memory must stay free on the host and in the control group when this process obtains pages: enough
/// for other processes, and for all ranks of the host to obtain kPieceBytes at the same time.
std::uint64_t bytes_kept_free();
/// Pages are obtained in pieces of this size. Before each piece, the available memory is read, which takes about 150
/// us.
inline constexpr std::uint64_t kPieceBytes = 16ULL << 20;

/// A request for memory that was not met.
struct MemoryShortage {
  std::uint64_t requested_bytes = 0;
  base::HostMemory host;          ///< when the request failed
  std::uint64_t kept_free = 0;    ///< bytes that Lockstep leaves to other processes
  int error_number = 0;           ///< errno of the kernel; 0 if `host` has not enough left and the kernel was not asked
  std::uint64_t arena_bytes = 0;  ///< resident in the arena of this process
  std::uint64_t shared_bytes = 0;  ///< shared by all ranks of this job on this host
  std::string largest_users;       ///< as describe_largest() of base/telemetry returns; may be empty
};

/// Finds out what uses the memory, from /proc. May take some 100 ms.
MemoryShortage examine_shortage(std::uint64_t requested_bytes, const base::HostMemory& host, int error_number,
                                std::uint64_t arena_bytes);
/// "no memory for 16 MiB more: the host has 40 MiB of 1000 MiB left (/proc/meminfo, MemTotal), ...". Pure.
std::string describe(const MemoryShortage& shortage);
/// The remedy for the user. Pure.
std::string remedy(const MemoryShortage& shortage);

}  // namespace lockstep::comm::arena
