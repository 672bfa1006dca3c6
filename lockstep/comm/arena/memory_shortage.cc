#include "lockstep/comm/arena/memory_shortage.h"

#include <cstring>

#include "lockstep/base/env.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/memory_users.h"

namespace lockstep::comm::arena {

using base::memory_text;

namespace {

constexpr std::uint64_t kAssumedRanks = 8;             // on a host, if the launcher does not say
constexpr std::uint64_t kHeadroomBytes = 64ULL << 20;  // left to other processes

}  // namespace

std::uint64_t ranks_on_host() {
  const base::Env& env = base::Env::this_process();
  for (const auto* text : {&env.lockstep_local_world_size, &env.local_world_size, &env.ompi_comm_world_local_size,
                           &env.mpi_localnranks, &env.slurm_ntasks_per_node}) {
    const auto number = *text ? base::parse_int(**text) : std::nullopt;
    if (number && *number > 0) return static_cast<std::uint64_t>(*number);
  }
  return kAssumedRanks;
}

std::uint64_t bytes_kept_free() { return kHeadroomBytes + ranks_on_host() * kPieceBytes; }

MemoryShortage examine_shortage(std::uint64_t requested_bytes, const base::HostMemory& host, int error_number,
                                std::uint64_t arena_bytes) {
  return {.requested_bytes = requested_bytes,
          .host = host,
          .kept_free = bytes_kept_free(),
          .error_number = error_number,
          .arena_bytes = arena_bytes,
          .shared_bytes = base::telemetry::shared_bytes_of_job(),
          .largest_users = describe_largest(base::telemetry::find_memory_users(host.cgroup))};
}

std::string describe(const MemoryShortage& shortage) {
  std::string text = "no memory for " + memory_text(shortage.requested_bytes) + " more: ";
  if (shortage.error_number != 0)
    text += std::string("the kernel refuses it (") + std::strerror(shortage.error_number) + "); ";
  text += shortage.host.describe();
  if (shortage.error_number == 0 && shortage.kept_free > 0)
    text += ", and " + memory_text(shortage.kept_free) + " must stay free";
  text += "; this rank's arena holds " + memory_text(shortage.arena_bytes) + ", and the ranks of this job share " +
          memory_text(shortage.shared_bytes) + " on this host";
  if (!shortage.largest_users.empty()) text += "; the largest other uses of memory: " + shortage.largest_users;
  return text;
}

std::string remedy(const MemoryShortage& shortage) {
  const std::string smaller = "use fewer ranks on this host, a smaller model or a smaller batch";
  if (!shortage.host.cgroup.empty())
    return smaller + ", or raise the memory limit of the container or job (docker run --memory, SLURM --mem)";
  if (shortage.host.limit_source.find("overcommit") != std::string::npos)
    return smaller + ", or let the kernel overcommit memory (sysctl vm.overcommit_memory=0)";
  return smaller + ", end other programs, or remove files from file systems in memory such as /dev/shm";
}

}  // namespace lockstep::comm::arena
