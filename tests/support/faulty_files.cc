// _FORTIFY_SOURCE would inline wrappers that bypass the functions defined here.
#undef _FORTIFY_SOURCE
#include "tests/support/faulty_files.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <mutex>

namespace lockstep::tests {
namespace {

enum class Mode { kOff, kFail, kRecord };
std::atomic<Mode> mode = Mode::kOff;
std::atomic<int> num_operations = 0, failing = -1, failure = 0;
std::mutex mutex;
std::vector<std::string> recorded;  // guarded by mutex

std::string path_of(int fd) {
  char path[4096];
  const auto length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  return length < 0 ? "?" : std::string(path, static_cast<std::size_t>(length));
}
std::string path_of(int folder, const char* name) {
  return folder == AT_FDCWD || name[0] == '/' ? name : path_of(folder) + "/" + name;
}

/// Counts an operation. Returns whether it must fail; errno is set then.
template <typename Describe>
bool fails(Describe describe) {
  if (mode == Mode::kOff) return false;
  const int number = num_operations++;
  if (mode == Mode::kRecord) {
    const std::lock_guard lock(mutex);
    recorded.push_back(describe());
    return false;
  }
  if (number != failing) return false;
  if (failure == 0) ::raise(SIGKILL);
  errno = failure;
  return true;
}

template <typename Function>
Function next_symbol(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

void begin(Mode how) {
  num_operations = 0;
  mode = how;
}

}  // namespace

void fail_file_operation(int number, int error) {
  failing = number;
  failure = error;
  begin(Mode::kFail);
}

void record_file_operations() {
  {
    const std::lock_guard lock(mutex);
    recorded.clear();
  }
  begin(Mode::kRecord);
}

int end_file_operations() {
  mode = Mode::kOff;
  return num_operations;
}

std::vector<std::string> file_operations() {
  const std::lock_guard lock(mutex);
  return recorded;
}

}  // namespace lockstep::tests

using namespace lockstep::tests;

extern "C" {

int openat(int folder, const char* path, int flags, ...) {
  static const auto next = next_symbol<int (*)(int, const char*, int, mode_t)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t rights = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return fails([&] { return "openat " + path_of(folder, path); }) ? -1 : next(folder, path, flags, rights);
}

ssize_t pwrite(int fd, const void* data, size_t num_bytes, off_t offset) {
  static const auto next = next_symbol<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return fails([&] { return "pwrite " + path_of(fd); }) ? -1 : next(fd, data, num_bytes, offset);
}

int fsync(int fd) {
  static const auto next = next_symbol<int (*)(int)>("fsync");
  return fails([&] { return "fsync " + path_of(fd); }) ? -1 : next(fd);
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  static const auto next = next_symbol<int (*)(int, const char*, int, const char*)>("renameat");
  return fails([&] { return "renameat " + path_of(from_folder, from) + " " + path_of(to_folder, to); })
             ? -1
             : next(from_folder, from, to_folder, to);
}

int mkdirat(int folder, const char* path, mode_t rights) noexcept {
  static const auto next = next_symbol<int (*)(int, const char*, mode_t)>("mkdirat");
  return fails([&] { return "mkdirat " + path_of(folder, path); }) ? -1 : next(folder, path, rights);
}
}
