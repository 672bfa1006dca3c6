#include "lockstep/train/report/resource_usage.h"

#include <dirent.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::training::inline report {
namespace {

/// The beginning of the kernel's tcp_info. That of <netinet/tcp.h> ends before it counts bytes, and <linux/tcp.h>
/// cannot be included with it.
struct TcpInfo {
  char before[120];
  std::uint64_t bytes_acked;
};

/// The address of one end of a connection, without the port; empty for what is not a connection over IP.
template <typename Query>
std::string address_of(int fd, Query query) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (query(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  const auto bytes = [&](const auto& field) {
    return std::string(reinterpret_cast<const char*>(&field), sizeof field);
  };
  if (address.ss_family == AF_INET) return bytes(reinterpret_cast<const sockaddr_in&>(address).sin_addr);
  if (address.ss_family == AF_INET6) return bytes(reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  return "";
}

/// Whether a descriptor is a connection to another host: its ends have different addresses.
bool is_to_other_host(int fd) {
  const std::string peer = address_of(fd, ::getpeername);
  return !peer.empty() && peer != address_of(fd, ::getsockname);
}

// As in nvml.h, which does not change them.
struct Utilization {
  unsigned gpu, memory;  // percent of time
};
struct Memory {
  unsigned long long total, free, used;
};

/// Calls a function of NVML; returns whether it exists and succeeded.
template <typename... Args>
bool call(void* library, const char* name, Args... args) {
  auto* const function = library ? reinterpret_cast<int (*)(Args...)>(::dlsym(library, name)) : nullptr;
  return function && function(args...) == 0;
}

}  // namespace

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
  // The kernel updates them at different times.
  use.peak_resident_bytes = std::max(use.peak_resident_bytes, use.resident_bytes);
  return use;
}

std::uint64_t SentBytes::total() {
  std::map<std::uint64_t, std::uint64_t> now;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir("/proc/self/fd"), ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    const auto number = base::parse_int(entry->d_name);
    const int fd = number ? static_cast<int>(*number) : -1;
    struct stat status{};
    if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode) || !is_to_other_host(fd)) continue;
    TcpInfo info{};
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) now[status.st_ino] = info.bytes_acked;
  }
  for (const auto& [inode, bytes] : now) {
    const auto before = connections_.find(inode);
    const bool same = before != connections_.end() && before->second <= bytes;  // else its inode was used again
    if (has_begun_) total_ += bytes - (same ? before->second : 0);
  }
  connections_ = std::move(now);
  has_begun_ = true;
  return total_;
}

GpuMonitor::GpuMonitor(const std::string& uuid, const char* library)
    : library_(::dlopen(library, RTLD_LAZY | RTLD_LOCAL)) {
  if (!call(library_, "nvmlInit_v2") || !call(library_, "nvmlDeviceGetHandleByUUID", uuid.c_str(), &device_))
    device_ = nullptr;
}

std::optional<GpuUse> GpuMonitor::read() const {
  Utilization use{};
  Memory memory{};
  if (!device_ || !call(library_, "nvmlDeviceGetUtilizationRates", device_, &use) ||
      !call(library_, "nvmlDeviceGetMemoryInfo", device_, &memory))
    return std::nullopt;
  return GpuUse{use.gpu / 100.0, memory.used};
}

}  // namespace lockstep::training::inline report
