#include "lockstep/base/shared_memory.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
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

/// Core dumps do not contain the mapping.
char* map_memory(const Fd& fd, std::size_t size, int sharing) {
  void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, sharing | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    throw SystemError(
        "cannot map " + std::to_string(size) + " bytes of shared memory" + limit_text(RLIMIT_AS, "ulimit -v"), error);
  }
  ::madvise(data, size, MADV_DONTDUMP);
  return static_cast<char*>(data);
}

}  // namespace

SharedMemory SharedMemory::create(const char* name, std::size_t size) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && size > limit.rlim_cur)
    throw SystemError(
        "cannot allocate " + std::to_string(size) + " bytes of shared memory" + limit_text(RLIMIT_FSIZE, "ulimit -f"),
        EFBIG);
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd)
    throw SystemError("cannot create shared memory", errno, Cause::kResource,
                      errno == EMFILE ? "raise ulimit -n"
                      : errno != EPERM && errno != ENOSYS
                          ? ""
                          : "allow the system call memfd_create, which a profile of the container may forbid (docker "
                            "run --security-opt seccomp=...)");
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
  data_ = map_memory(fd_, size, MAP_SHARED);
  ::madvise(data_, size, MADV_DONTFORK);
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
    else if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EPERM)  // the last where a container forbids the call
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

PrivateView::PrivateView(const SharedMemory& memory, std::size_t size, Detection detection)
    : memory_(memory), size_(size), page_bytes_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
  data_ = map_memory(memory.fd(), size, MAP_PRIVATE);
  if (detection == Detection::kPagemap) pagemap_ = Fd(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
}

PrivateView::~PrivateView() { ::munmap(data_, size_); }

/// The pages of which this process may have a copy.
std::vector<PrivateView::Range> PrivateView::written_pages() const {
  // Documentation/admin-guide/mm/pagemap.rst of Linux
  constexpr std::uint64_t kPresent = std::uint64_t{1} << 63, kSwapped = std::uint64_t{1} << 62,
                          kOfFile = std::uint64_t{1} << 61;
  std::array<std::uint64_t, 4096> entries;
  std::vector<Range> written;
  const std::size_t first_page = reinterpret_cast<std::uintptr_t>(data_) / page_bytes_, pages = size_ / page_bytes_;
  for (std::size_t page = 0; page < pages;) {
    const std::size_t count = std::min(entries.size(), pages - page);
    const ssize_t bytes = pagemap_ ? ::pread(pagemap_.get(), entries.data(), count * sizeof(std::uint64_t),
                                             static_cast<off_t>((first_page + page) * sizeof(std::uint64_t)))
                                   : -1;
    if (bytes != static_cast<ssize_t>(count * sizeof(std::uint64_t))) return {{0, size_}};
    for (std::size_t i = 0; i < count; ++i, ++page) {
      const bool is_copy = entries[i] & kPresent ? !(entries[i] & kOfFile) : (entries[i] & kSwapped) != 0;
      if (!is_copy) continue;
      if (written.empty() || written.back().end != page * page_bytes_)
        written.push_back({page * page_bytes_, page * page_bytes_});
      written.back().end += page_bytes_;
    }
  }
  return written;
}

std::vector<PrivateView::Range> PrivateView::changes() {
  std::vector<Range> changed, same;
  for (const Range& range : written_pages()) {
    for (std::size_t page = range.begin; page < range.end; page += page_bytes_) {
      std::vector<Range>& to = std::memcmp(data_ + page, memory_.data() + page, page_bytes_) == 0 ? same : changed;
      if (to.empty() || to.back().end != page) to.push_back({page, page});
      to.back().end += page_bytes_;
    }
  }
  drop(same);
  return changed;
}

void PrivateView::drop(const std::vector<Range>& ranges) noexcept {
  for (const Range& range : ranges) ::madvise(data_ + range.begin, range.end - range.begin, MADV_DONTNEED);
}

}  // namespace lockstep::base
