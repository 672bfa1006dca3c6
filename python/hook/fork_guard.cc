#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>

#include <cstddef>
#include <cstdint>

#include "python/hook/watch.h"

namespace {

// From CPython's C interface, which this library looks up in the running interpreter.
using AcquireLock = int (*)(void* lock, long long microseconds, int is_interruptible);
using ReleaseLock = void (*)(void* lock);
using GetInterpreter = void* (*)();

AcquireLock acquire_lock = nullptr;
ReleaseLock release_lock = nullptr;
void* lock_of_threads = nullptr;
thread_local bool is_held = false;  // the thread that forks calls all handlers, also in the child

/// Its holders only change a list, so a second is enough. The limit is for a program that forks while this thread
/// itself has the lock: then the child is as without this guard.
constexpr long long kAcquireLimit = 1'000'000;  // us

template <typename Function>
Function find_function(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
}

/// Returns the lock of the list of thread states: `interpreters.mutex` in _PyRuntime, which is private. The list of
/// interpreters follows it: { mutex, head, main, next_id }, with the same values as the public functions return.
void* find_lock_of_threads() {
  const auto head = find_function<GetInterpreter>("PyInterpreterState_Head");
  const auto main = find_function<GetInterpreter>("PyInterpreterState_Main");
  void* const runtime = ::dlsym(RTLD_DEFAULT, "_PyRuntime");
  Dl_info info{};
  ElfW(Sym)* symbol = nullptr;
  if (!head || !main || !runtime || ::dladdr1(runtime, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) == 0 ||
      !symbol)
    return nullptr;
  void* const* const words = static_cast<void* const*>(runtime);
  void* found = nullptr;
  for (std::size_t i = 0; (i + 4) * sizeof(void*) <= symbol->st_size; ++i) {
    const auto next_id = reinterpret_cast<std::uintptr_t>(words[i + 3]);
    if (!words[i] || words[i + 1] != head() || words[i + 2] != main() || next_id < 1 || next_id > 1'000'000) continue;
    if (found) return nullptr;
    found = words[i];
  }
  return found;
}

void before_fork() { is_held = acquire_lock(lock_of_threads, kAcquireLimit, 0) == 1; }
void after_fork() {
  if (is_held) release_lock(lock_of_threads);
  is_held = false;
}

}  // namespace

void* lockstep_watch_guard_forks() {
  if (lock_of_threads) return lock_of_threads;
  acquire_lock = find_function<AcquireLock>("PyThread_acquire_lock_timed");
  release_lock = find_function<ReleaseLock>("PyThread_release_lock");
  void* const lock = acquire_lock && release_lock ? find_lock_of_threads() : nullptr;
  if (!lock) return nullptr;
  lock_of_threads = lock;
  if (::pthread_atfork(before_fork, after_fork, after_fork) != 0) lock_of_threads = nullptr;
  return lock_of_threads;
}
