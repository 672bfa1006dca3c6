#include "lockstep/base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::base {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

}  // namespace

SharedMemory SharedMemory::create(const char* name, std::size_t size) {
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
  if (data == MAP_FAILED) throw SystemError("cannot map " + std::to_string(size) + " bytes of shared memory", errno);
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

void SharedMemory::set_dumped(std::size_t offset, std::size_t size, bool dumped) const noexcept {
  ::madvise(data_ + offset, size, dumped ? MADV_DODUMP : MADV_DONTDUMP);
}

void SharedMemory::unmap() noexcept {
  if (data_) ::munmap(data_, size_);
}

}  // namespace lockstep::base
