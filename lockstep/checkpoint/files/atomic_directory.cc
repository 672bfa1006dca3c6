#include "lockstep/checkpoint/files/atomic_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/directory.h"

namespace lockstep::checkpoint::files {
namespace {

namespace fs = std::filesystem;

bool try_lock(const base::Fd& entry) { return entry && ::flock(entry.get(), LOCK_EX | LOCK_NB) == 0; }

// Removes directories and files of killed processes, whose locks are free. Entries that cannot be removed remain for
// the next call. Entries that cannot be locked (NFS does not lock directories) remain until the user removes them.
void remove_stale(const std::string& parent) {
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(kTempPrefix)) continue;
    const base::Fd stale(::openat(AT_FDCWD, entry->path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    std::error_code ignored;
    if (try_lock(stale)) fs::remove_all(entry->path(), ignored);
  }
  if (error) throw base::SystemError("cannot read the directory " + parent, error.value());
}

}  // namespace

AtomicDirectory::AtomicDirectory(const std::string& parent) : parent_(parent) {
  parent_directory_ = open_directory(parent, parent + "/*");
  remove_stale(parent);
  const std::string temp = make_temp_name();
  path_ = parent + "/" + temp;
  if (::mkdirat(parent_directory_.get(), temp.c_str(), 0777) != 0)
    throw base::SystemError("cannot create a directory in " + parent, errno);
  directory_.reset(::openat(parent_directory_.get(), temp.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  const int number = directory_ && (try_lock(directory_) || errno != EWOULDBLOCK) ? 0 : errno;
  if (number != 0) ::unlinkat(parent_directory_.get(), temp.c_str(), AT_REMOVEDIR);
  if (number != 0) throw base::SystemError("cannot lock the directory " + path_, number);
  temp_name_ = temp;
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  if (!temp_name_.empty()) fs::remove_all(path_, ignored);
}

void AtomicDirectory::commit(const std::string& name) {
  sync_directory(directory_, path_ + "/*");
  if (::renameat(parent_directory_.get(), temp_name_.c_str(), parent_directory_.get(), name.c_str()) != 0)
    throw base::SystemError("cannot rename the temporary directory to " + parent_ + "/" + name, errno);
  temp_name_.clear();
  path_ = parent_ + "/" + name;
  sync_directory(parent_directory_, path_);
}

void remove_directory(const std::string& parent, const std::string& name, const std::string& first) {
  const base::Fd folder = open_directory(parent, parent + "/" + name);
  std::string temp = make_temp_name();
  if (::renameat(folder.get(), name.c_str(), folder.get(), temp.c_str()) != 0) {
    // On an overlay file system, as in a container, a folder of a layer below cannot be renamed.
    if (errno != EXDEV || (::unlinkat(folder.get(), (name + "/" + first).c_str(), 0) != 0 && errno != ENOENT))
      throw base::SystemError("cannot remove " + parent + "/" + name, errno);
    temp = name;
  }
  std::error_code error;
  fs::remove_all(parent + "/" + temp, error);
  if (error) throw base::SystemError("cannot remove " + parent + "/" + temp, error.value());
}

}  // namespace lockstep::checkpoint::files
