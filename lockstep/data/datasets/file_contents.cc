#include "lockstep/data/datasets/file_contents.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"

namespace lockstep::data::inline datasets {

void append_file_contents(const std::string& path, std::uint64_t max_bytes, std::string& text) {
  const base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw base::SystemError("cannot read " + path, errno);
  if (!S_ISREG(status.st_mode))
    throw base::UsageError("cannot read " + path + ": it is neither a regular file nor a directory");
  const auto size = std::min(static_cast<std::uint64_t>(status.st_size), max_bytes - text.size());
  std::size_t done = text.size();
  text.resize(text.size() + size);
  while (done < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw base::SystemError("cannot read " + path, errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
}

}  // namespace lockstep::data::inline datasets
