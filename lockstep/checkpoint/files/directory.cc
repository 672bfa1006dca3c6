#include "lockstep/checkpoint/files/directory.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>

#include "lockstep/base/error.h"

namespace lockstep::checkpoint::files {

std::string make_temp_name() {
  std::uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) throw base::SystemError("cannot read random bytes", errno);
  char name[40];
  std::snprintf(name, sizeof name, "%s%016llx", kTempPrefix, static_cast<unsigned long long>(bits));
  return name;
}

base::Fd open_directory(const std::string& folder, const std::string& what) {
  base::Fd opened(::openat(AT_FDCWD, folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat status{};
  if (!opened || ::fstat(opened.get(), &status) != 0)
    throw base::SystemError("cannot open the directory of " + what, errno);
  if ((status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0)
    throw base::UsageError("cannot write " + what + ": its directory is world-writable and has no sticky bit",
                           "run: chmod o-w " + folder);
  return opened;
}

void sync_directory(const base::Fd& folder, const std::string& what) {
  // A few file systems do not support fsync() of a directory and return EINVAL. On these, a rename cannot be made more
  // durable.
  if (::fsync(folder.get()) != 0 && errno != EINVAL)
    throw base::SystemError("cannot flush to disk the directory of " + what, errno);
}

void create_directories(const std::string& folder) {
  std::filesystem::path path;
  for (const auto& part : std::filesystem::path(folder)) {
    const std::string parent = path.empty() ? "." : path.string();
    path /= part;
    if (::mkdirat(AT_FDCWD, path.c_str(), 0777) != 0) {
      if (errno == EEXIST) continue;
      throw base::SystemError("cannot create the directory " + path.string(), errno);
    }
    sync_directory(base::Fd(::openat(AT_FDCWD, parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), path.string());
  }
}

}  // namespace lockstep::checkpoint::files
