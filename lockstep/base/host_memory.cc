#include "lockstep/base/host_memory.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::base {
namespace {

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<std::uint64_t> parse_limit(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  const auto value = parse_int(std::string_view(*text).substr(0, text->find('\n')));
  if (!value || *value < 0) return std::nullopt;  // "max" means unlimited
  return static_cast<std::uint64_t>(*value);
}

/// Returns the number after `name` in lines such as "MemAvailable:  2048 kB" or "inactive_file 4096".
std::optional<std::uint64_t> value_of(const std::string& text, const std::string& name) {
  for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    if (at > 0 && text[at - 1] != '\n') continue;
    const std::size_t begin = text.find_first_not_of(' ', at + name.size());
    if (begin == at + name.size() || begin == std::string::npos) continue;  // a longer name, or no number
    if (const auto value = parse_int(text.substr(begin, text.find_first_of(" \n", begin) - begin)))
      return static_cast<std::uint64_t>(*value);
  }
  return std::nullopt;
}

/// The names that differ between the two versions of control groups.
struct CgroupVersion {
  const char* controllers;  ///< second field of the version's line of /proc/self/cgroup
  const char* root;
  const char* limit;
  const char* usage;
  const char* caches[3];  ///< entries of memory.stat, of the group and its children, that the kernel can reclaim
};
constexpr CgroupVersion kCgroupVersions[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}},
    {"memory",
     "/sys/fs/cgroup/memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file", "total_active_file", nullptr}},
};

/// Calls `visit` with "/a/b", "/a" and "" for the line "0::/a/b" or "4:memory:/a/b" of /proc/self/cgroup, and with ""
/// without such a line.
template <typename Visit>
void for_each_cgroup(const ReadFile& read, std::string_view controllers, const Visit& visit) {
  std::string group = "/";
  for (const std::string& line : split(read("/proc/self/cgroup").value_or(""), '\n')) {
    const std::size_t begin = line.find(':') + 1, path = line.find(":/", begin);
    if (path == std::string::npos) continue;
    const auto names = split(std::string_view(line).substr(begin, path - begin), ',');
    if (std::find(names.begin(), names.end(), controllers) == names.end()) continue;
    group = line.substr(path + 1);
    break;
  }
  for (;; group.resize(group.rfind('/'))) {
    if (group == "/") group.clear();
    visit(group);
    if (group.empty()) return;
  }
}

/// Returns what `group` and its children can still allocate; nullopt if it has no limit.
std::optional<HostMemory> left_in(const ReadFile& read, const CgroupVersion& version, const std::string& group) {
  const std::string folder = version.root + group;
  const auto limit = parse_limit(read(folder + "/" + version.limit));
  const auto used = parse_limit(read(folder + "/" + version.usage));
  if (!limit || !used) return std::nullopt;
  const std::string stat = read(folder + "/memory.stat").value_or("");
  std::uint64_t needed = *used;
  for (const char* const cache : version.caches)
    if (cache) needed -= std::min(needed, value_of(stat, cache).value_or(0));
  return HostMemory{*limit > needed ? *limit - needed : 0, folder, *limit, version.limit};
}

}  // namespace

std::string memory_text(std::uint64_t bytes) {
  constexpr std::uint64_t kMib = 1 << 20;
  return bytes >= kMib || bytes == 0 ? std::to_string(bytes >> 20) + " MiB" : std::to_string(bytes >> 10) + " KiB";
}

std::string HostMemory::describe() const {
  if (limit_source.empty()) return "the limit is unknown";
  return limited_by() + " has " + memory_text(available_bytes) + " of " + memory_text(limit_bytes) + " left (" +
         limit_source + ")";
}

HostMemory HostMemory::from(const ReadFile& read) {
  constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
  HostMemory least{kUnlimited, "", kUnlimited, ""};
  const auto limit = [&](HostMemory other) {
    if (other.available_bytes < least.available_bytes) least = std::move(other);
  };
  const std::string meminfo = read("/proc/meminfo").value_or("");
  const auto host_bytes = [&](const char* name) { return value_of(meminfo, name).value_or(0) * 1024; };
  if (value_of(meminfo, "MemAvailable:"))
    limit({host_bytes("MemAvailable:"), "", host_bytes("MemTotal:"), "/proc/meminfo, MemTotal"});
  if (read("/proc/sys/vm/overcommit_memory").value_or("").starts_with('2')) {
    const std::uint64_t all = host_bytes("CommitLimit:"), used = host_bytes("Committed_AS:");
    limit({all > used ? all - used : 0, "", all, "/proc/meminfo, CommitLimit; vm.overcommit_memory is 2"});
  }
  for (const CgroupVersion& version : kCgroupVersions)
    for_each_cgroup(read, version.controllers, [&](const std::string& group) {
      if (auto left = left_in(read, version, group)) limit(std::move(*left));
    });
  return least;
}

HostMemory HostMemory::now() { return from(read_file); }

double cpu_quota(const ReadFile& read) {
  double least = std::numeric_limits<double>::infinity();
  const auto limit = [&](const std::optional<std::uint64_t>& quota, const std::optional<std::uint64_t>& period) {
    if (quota && period && *quota > 0 && *period > 0)
      least = std::min(least, static_cast<double>(*quota) / static_cast<double>(*period));
  };
  for_each_cgroup(read, "", [&](const std::string& group) {
    const std::string text = read("/sys/fs/cgroup" + group + "/cpu.max").value_or("");
    const std::size_t space = text.find(' ');
    if (space != std::string::npos) limit(parse_limit(text.substr(0, space)), parse_limit(text.substr(space + 1)));
  });
  for_each_cgroup(read, "cpu", [&](const std::string& group) {
    const std::string folder = "/sys/fs/cgroup/cpu" + group;
    limit(parse_limit(read(folder + "/cpu.cfs_quota_us")), parse_limit(read(folder + "/cpu.cfs_period_us")));
  });
  return least;
}

double cpu_quota() { return cpu_quota(read_file); }

}  // namespace lockstep::base
