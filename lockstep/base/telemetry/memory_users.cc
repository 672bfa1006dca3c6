#include "lockstep/base/telemetry/memory_users.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

#include "lockstep/base/host_memory.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::base::telemetry {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMinBytes = 1 << 20;
constexpr int kMaxFiles = 10000;  // per file system: what is beyond is not searched for the largest file
constexpr std::size_t kNumNamed = 4;

/// Returns whether `folder` is the directory of the control group of the process, or of an ancestor of that group.
bool is_in_cgroup(const std::string& process, const std::string& folder) {
  std::ifstream file(process + "/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t path = line.find(":/");
    if (path == std::string::npos) continue;
    const std::string root = line.starts_with("0::") ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    if ((root + line.substr(path + 1) + "/").starts_with(folder + "/")) return true;
  }
  return false;
}

std::optional<MemoryUser> read_process(pid_t pid, const std::string& process, const std::string& job) {
  std::ifstream status(process + "/status");
  std::string word, name;
  std::uint64_t own = 0, shared = 0;
  while (status >> word) {
    if (word == "Name:") status >> name;
    if (word == "RssAnon:") status >> own;
    if (word == "RssShmem:") status >> shared;
  }
  const auto rank = find_rank_page(pid);
  const bool is_rank = rank && !job.empty() && rank->job == job;
  const std::uint64_t bytes = (is_rank ? own : own + shared) * 1024;
  if (bytes < kMinBytes) return std::nullopt;
  return MemoryUser{"process " + std::to_string(pid) + " (" + escaped(name, 64) +
                        (is_rank ? ", rank " + std::to_string(rank->rank) + " of this job" : "") + ")",
                    bytes};
}

/// Returns " (the largest: FILE, N MiB; N MiB in deleted files or in directories that cannot be read)".
std::string describe_files(const fs::path& folder, dev_t device, std::uint64_t used) {
  fs::path largest;
  std::uint64_t largest_bytes = 0, found = 0;
  std::error_code error;
  int left = kMaxFiles;
  fs::recursive_directory_iterator file(folder, fs::directory_options::skip_permission_denied, error);
  for (; !error && file != fs::recursive_directory_iterator() && left > 0; file.increment(error), --left) {
    struct stat status{};
    if (::lstat(file->path().c_str(), &status) != 0) continue;
    if (status.st_dev != device) file.disable_recursion_pending();  // such as /proc, or a server that does not answer
    if (status.st_dev != device || !S_ISREG(status.st_mode)) continue;
    const std::uint64_t bytes = static_cast<std::uint64_t>(status.st_blocks) * 512;
    found += bytes;
    if (bytes > largest_bytes) largest = file->path(), largest_bytes = bytes;
  }
  std::string text;
  if (largest_bytes >= kMinBytes)
    text = "the largest: " + escaped(largest.string(), 256) + ", " + memory_text(largest_bytes);
  if (!error && left > 0 && used >= found + kMinBytes)
    text += (text.empty() ? "" : "; ") + memory_text(used - found) +
            " in deleted files or in directories that cannot be read";
  return text.empty() ? "" : " (" + text + ")";
}

void add_file_systems(std::vector<MemoryUser>& users) {
  std::set<dev_t> devices;  // a file system may be mounted several times
  std::ifstream mounts("/proc/self/mounts");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string device, folder, type;
    struct stat status{};
    struct statvfs space{};
    if (!(words >> device >> folder >> type) || type != "tmpfs" || ::stat(folder.c_str(), &status) != 0 ||
        !devices.insert(status.st_dev).second || ::statvfs(folder.c_str(), &space) != 0)
      continue;
    const std::uint64_t used = (space.f_blocks - space.f_bfree) * space.f_frsize;
    if (used >= kMinBytes)
      users.push_back({"files in " + escaped(folder, 256) + describe_files(folder, status.st_dev, used), used});
  }
}

}  // namespace

std::vector<MemoryUser> find_memory_users(const std::string& cgroup) {
  std::vector<MemoryUser> users;
  const auto self = read_rank_page(RankPage::this_process());
  std::error_code error;
  fs::directory_iterator entry("/proc", error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const auto pid = parse_int(entry->path().filename().string());
    const std::string process = entry->path().string();
    if (!pid || (!cgroup.empty() && !is_in_cgroup(process, cgroup))) continue;
    if (auto user = read_process(static_cast<pid_t>(*pid), process, self ? self->job : "")) users.push_back(*user);
  }
  if (cgroup.empty() || cgroup == "/sys/fs/cgroup" || cgroup == "/sys/fs/cgroup/memory") add_file_systems(users);
  return users;
}

std::uint64_t shared_bytes_of_job() {
  std::uint64_t bytes = 0;
  std::set<ino_t> counted;
  std::error_code error;
  fs::directory_iterator entry("/proc/self/fd", error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code unreadable;
    const std::string target = fs::read_symlink(entry->path(), unreadable).string();
    struct stat status{};
    if (!target.starts_with("/memfd:lockstep-") || ::stat(entry->path().c_str(), &status) != 0) continue;
    if (counted.insert(status.st_ino).second) bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

std::string describe_largest(std::vector<MemoryUser> users) {
  std::stable_sort(users.begin(), users.end(),
                   [](const MemoryUser& left, const MemoryUser& right) { return left.bytes > right.bytes; });
  if (users.size() > kNumNamed) users.resize(kNumNamed);
  return joined(users, ", ", [](const MemoryUser& user) { return user.name + " " + memory_text(user.bytes); });
}

}  // namespace lockstep::base::telemetry
