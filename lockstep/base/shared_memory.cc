#include "lockstep/base/shared_memory.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::base {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

/// Returns " (NAME is N bytes)" if the process has that limit.
std::string limit_text(decltype(RLIMIT_AS) resource, const char* name) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return std::string(" (") + name + " is " + std::to_string(limit.rlim_cur) + " bytes)";
}

}  // namespace

SharedMemory SharedMemory::create(const char* name, std::size_t size) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && size > limit.rlim_cur)
    throw SystemError(
        "cannot allocate " + std::to_string(size) + " bytes of shared memory" + limit_text(RLIMIT_FSIZE, "ulimit -f"),
        EFBIG);
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw SystemError("cannot create shared memory", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    throw SystemError("cannot allocate " + std::to_string(size) + " bytes of shared memory", errno);
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw SystemError("cannot seal shared memory", errno);
  return {std::move(fd), size};
}

SharedMemory SharedMemory::map(Fd fd, std::size_t size) {
  struct stat status{};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(fd.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(size))
    throw SystemError(
        "a descriptor from another process is not sealed shared memory of " + std::to_string(size) + " bytes", EINVAL);
  return {std::move(fd), size};
}

SharedMemory::SharedMemory(Fd fd, std::size_t size) : fd_(std::move(fd)), size_(size) {
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    throw SystemError(
        "cannot map " + std::to_string(size) + " bytes of shared memory" + limit_text(RLIMIT_AS, "ulimit -v"), error);
  }
  ::madvise(data, size, MADV_DONTFORK);
  ::madvise(data, size, MADV_DONTDUMP);
  data_ = static_cast<char*>(data);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  fd_ = std::move(other.fd_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

int SharedMemory::reserve(std::size_t offset, std::size_t size) const noexcept {
  // A signal interrupts fallocate(), which then frees what the call has allocated: short calls make progress.
  constexpr std::size_t kMaxBytesPerCall = 4 << 20, kMinBytesPerCall = 4096;
  std::size_t bytes_per_call = kMaxBytesPerCall;
  for (const std::size_t end = offset + size; offset < end;) {
    const std::size_t bytes = std::min(bytes_per_call, end - offset);
    if (::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0)
      offset += bytes;
    else if (errno == EOPNOTSUPP || errno == ENOSYS)
      return 0;
    else if (errno == EINTR)
      bytes_per_call = std::max(bytes_per_call / 2, kMinBytesPerCall);
    else
      return errno;
  }
  return 0;
}

void SharedMemory::interleave() const noexcept {
  constexpr unsigned long kMaxNodes = 1024;
  unsigned long nodes[kMaxNodes / (8 * sizeof(unsigned long))] = {};
  int policy = MPOL_DEFAULT;
  if (::syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) == 0 && policy == MPOL_DEFAULT &&
      ::syscall(SYS_get_mempolicy, nullptr, nodes, kMaxNodes, nullptr, MPOL_F_MEMS_ALLOWED) == 0)
    ::syscall(SYS_mbind, data_, size_, MPOL_INTERLEAVE, nodes, kMaxNodes, 0);
}

void SharedMemory::set_dumped(std::size_t offset, std::size_t size, bool dumped) const noexcept {
  ::madvise(data_ + offset, size, dumped ? MADV_DODUMP : MADV_DONTDUMP);
}

void SharedMemory::unmap() noexcept {
  if (data_) ::munmap(data_, size_);
}

}  // namespace lockstep::base
