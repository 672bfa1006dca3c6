#include "lockstep/comm/arena/capacity.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <utility>

#include "lockstep/base/host_memory.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/arena/memory_shortage.h"

namespace lockstep::comm::arena {
namespace {

using base::memory_text;

constexpr std::uint64_t kMinCapacityBytes = 64ULL << 20;

/// Returns the smaller one, and logs the reason if that is `other`.
Capacity choose_smaller(Capacity capacity, Capacity other, const std::string& reason) {
  if (other.bytes >= capacity.bytes) return capacity;
  base::log_info(reason + ": the arena holds at most " + memory_text(other.bytes));
  return other;
}

}  // namespace

Capacity choose_capacity() {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t memory = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  Capacity capacity{memory + memory / 4, ""};
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    capacity = choose_smaller(std::move(capacity), {limit.rlim_cur / page * page, "ulimit -f"},
                              "the files of this rank are limited to " + memory_text(limit.rlim_cur) + " (ulimit -f)");
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return capacity;
  std::uint64_t used_pages = 0;
  std::ifstream("/proc/self/statm") >> used_pages;
  const std::uint64_t used = used_pages * page;
  const std::uint64_t left = limit.rlim_cur > used ? limit.rlim_cur - used : 0;
  return choose_smaller(std::move(capacity), {std::max(left / 2 / ranks_on_host(), kMinCapacityBytes), "ulimit -v"},
                        "the address space of this rank is limited to " + memory_text(limit.rlim_cur) +
                            " (ulimit -v), of which " + memory_text(used) + " are used");
}

}  // namespace lockstep::comm::arena
