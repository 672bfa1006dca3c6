#include "lockstep/checkpoint/files/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/directory.h"

namespace lockstep::checkpoint::files {

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
  if (::fsync(file_.get()) != 0) throw_system_error("cannot flush to disk ");
  if (::close(file_.release()) != 0) throw_system_error("cannot close ");
  if (::renameat(directory_.get(), temp_name_.c_str(), directory_.get(), name_.c_str()) != 0)
    throw_system_error("cannot rename the temporary file to ");
  temp_name_.clear();
  sync_directory(directory_, path_);
}

}  // namespace lockstep::checkpoint::files
