#include "lockstep/base/host_memory.h"

#include <fstream>
#include <limits>
#include <sstream>

#include "lockstep/base/parse.h"

namespace lockstep::base {
namespace {

using ReadFile = std::function<std::optional<std::string>(const std::string&)>;

constexpr const char* kCgroupRoot = "/sys/fs/cgroup";

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::uint64_t> parse_limit(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  const auto value = parse_int(std::string_view(*text).substr(0, text->find('\n')));
  if (!value || *value < 0) return std::nullopt;  // "max" means unlimited
  return static_cast<std::uint64_t>(*value);
}

std::optional<std::uint64_t> host_available_bytes(const ReadFile& read) {
  const auto text = read("/proc/meminfo");
  if (!text) return std::nullopt;
  std::istringstream lines(*text);
  std::string name;
  std::uint64_t kib = 0;
  for (std::string line; std::getline(lines, line);)
    if (std::istringstream words(line); words >> name >> kib && name == "MemAvailable:") return kib * 1024;
  return std::nullopt;
}

/// Returns "/a/b" from the line "0::/a/b" of /proc/self/cgroup.
std::string own_cgroup(const ReadFile& read) {
  const auto text = read("/proc/self/cgroup");
  std::istringstream lines(text.value_or(""));
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("0::/")) return line.substr(3);
  return "";
}

}  // namespace

HostMemory HostMemory::from(const ReadFile& read) {
  HostMemory least{std::numeric_limits<std::uint64_t>::max(), ""};
  const auto limit = [&](std::uint64_t bytes, const std::string& cgroup) {
    if (bytes < least.available_bytes) least = {bytes, cgroup};
  };
  if (const auto host = host_available_bytes(read)) limit(*host, "");
  for (std::string group = own_cgroup(read); !group.empty() && group != "/"; group.resize(group.rfind('/'))) {
    const std::string folder = kCgroupRoot + group;
    const auto max = parse_limit(read(folder + "/memory.max"));
    const auto used = parse_limit(read(folder + "/memory.current"));
    if (max && used) limit(*max > *used ? *max - *used : 0, folder);
  }
  return least;
}

HostMemory HostMemory::now() { return from(read_file); }

}  // namespace lockstep::base
