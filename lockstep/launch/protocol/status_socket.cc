#include "lockstep/launch/protocol/status_socket.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/net/unix_socket.h"

namespace lockstep::launcher::protocol {
namespace {

constexpr off_t kMaxReplyBytes = 256 << 20;  // 4096 ranks with 64 operations each take less than 100 MiB

/// Returns the content of a file in memory; "" if it is too large or cannot be read.
std::string read_all(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > kMaxReplyBytes) return "";
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t size = ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return "";
    done += static_cast<std::size_t>(size);
  }
  return bytes;
}

}  // namespace

void send_job_status(int connection, const JobStatus& job) {
  const base::Fd file(::memfd_create("lockstep-status", MFD_CLOEXEC));
  if (!file || !base::write_all(file.get(), encode_job_status(job))) return;  // the kernel has too little memory
  try {
    base::net::send_fd(connection, 0, file.get());
  } catch (const base::SystemError&) {
    // The reader has ended.
  }
}

JobStatus receive_job_status(int connection, base::Deadline deadline) {
  return decode_job_status(read_all(base::net::receive_fd(connection, deadline).fd.get()));
}

StatusReplies request_job_status(base::Deadline deadline, std::string_view socket_prefix) {
  StatusReplies replies;
  for (const base::net::AbstractConnection& connection : base::net::connect_to_all(socket_prefix)) {
    try {
      replies.jobs.push_back(receive_job_status(connection.fd.get(), deadline));
    } catch (const base::SystemError& error) {
      if (error.cause() == base::Cause::kJoinTimeout) replies.silent.push_back(connection.pid);  // else it has ended
    } catch (const base::Error&) {
      replies.silent.push_back(connection.pid);
    }
  }
  return replies;
}

}  // namespace lockstep::launcher::protocol
