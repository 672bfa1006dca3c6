#include "lockstep/checkpoint/files/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "lockstep/base/env.h"
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

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  name_ = slash == std::string::npos ? path : path.substr(slash + 1);
  if (name_.empty() || name_ == "." || name_ == ".." || path.find('\0') != std::string::npos)
    throw base::UsageError("cannot write \"" + path + "\": it does not name a file");
  directory_ = open_directory(folder, path);
  const std::string temp = make_temp_name();
  file_.reset(::openat(directory_.get(), temp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file_) throw_system_error("cannot create a file in the directory of ");
  temp_name_ = temp;
  // The lock keeps an AtomicDirectory from removing the file as stale.
  ::flock(file_.get(), LOCK_EX | LOCK_NB);
}

AtomicFile::~AtomicFile() {
  if (!temp_name_.empty()) ::unlinkat(directory_.get(), temp_name_.c_str(), 0);
}

void AtomicFile::throw_system_error(const char* what) const { throw base::SystemError(what + path_, errno); }

void AtomicFile::write(const void* data, std::size_t num_bytes) {
  overwrite(num_bytes_, data, num_bytes);
  num_bytes_ += num_bytes;
}

void AtomicFile::overwrite(std::uint64_t offset, const void* data, std::size_t num_bytes) {
  const auto* bytes = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::pwrite(file_.get(), bytes, num_bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_system_error("cannot write ");
    bytes += written;
    offset += static_cast<std::uint64_t>(written);
    num_bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  // Under `lockstep plan`, a program only shows how long its steps take.
  if (const auto profile = base::profile_request()) {
    std::error_code error;
    const auto folder = std::filesystem::weakly_canonical(std::filesystem::absolute(path_).parent_path(), error);
    if (error || !(folder.string() + "/").starts_with(profile->folder + "/")) return;
  }
  if (::fsync(file_.get()) != 0) throw_system_error("cannot flush to disk ");
  if (::close(file_.release()) != 0) throw_system_error("cannot close ");
  if (::renameat(directory_.get(), temp_name_.c_str(), directory_.get(), name_.c_str()) != 0)
    throw_system_error("cannot rename the temporary file to ");
  temp_name_.clear();
  sync_directory(directory_, path_);
}

void write_file(const std::string& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

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
