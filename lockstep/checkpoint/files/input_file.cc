#include "lockstep/checkpoint/files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::checkpoint::files {

InputFile::InputFile(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status{};
  if (!file_ || ::fstat(file_.get(), &status) != 0) throw base::SystemError("cannot read " + path, errno);
  if (!S_ISREG(status.st_mode)) throw base::UsageError("cannot read " + path + ": it is not a regular file");
  num_bytes_ = static_cast<std::uint64_t>(status.st_size);
}

void InputFile::read(std::uint64_t offset, void* data, std::uint64_t num_bytes) const {
  auto* bytes = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t got = ::pread(file_.get(), bytes, num_bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw base::SystemError("cannot read " + path_, errno);
    if (got == 0) throw_format_error(offset, "the file has become shorter while it was read");
    bytes += got;
    offset += static_cast<std::uint64_t>(got);
    num_bytes -= static_cast<std::uint64_t>(got);
  }
}

void InputFile::throw_format_error(std::uint64_t offset, const std::string& reason) const {
  throw base::FormatError(path_ + ":" + std::to_string(offset) + ": " + reason);
}

}  // namespace lockstep::checkpoint::files
