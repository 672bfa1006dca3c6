#include "lockstep/train/report/resource_usage.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace lockstep::training::inline report {

ResourceUsage ResourceUsage::now() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  std::uint64_t all_pages = 0, resident_pages = 0;
  std::ifstream("/proc/self/statm") >> all_pages >> resident_pages;
  ResourceUsage use{.cpu_seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime),
                    .resident_bytes = resident_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)),
                    .peak_resident_bytes = static_cast<std::uint64_t>(usage.ru_maxrss) << 10};
  use.peak_resident_bytes =
      std::max(use.peak_resident_bytes, use.resident_bytes);  // the kernel updates them at different times
  return use;
}

}  // namespace lockstep::training::inline report
