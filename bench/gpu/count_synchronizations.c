// Counts how often a process waits for its GPU: functions of the CUDA runtime that block, and call the real ones. Load
// it with LD_PRELOAD. libtorch reads a tensor's values with cudaStreamSynchronize().
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static atomic_uint_least64_t count;

// The number of waits so far. bench_gpu_step and pytorch_step.py find this function by its name.
uint64_t count_synchronizations(void) { return atomic_load(&count); }

typedef int (*wait_for)(void* what);
typedef int (*copy)(void* to, const void* from, size_t bytes, int kind);

// The runtime's own function. Where the runtime was not loaded for all libraries, RTLD_NEXT does not find it.
static void* real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  const char* runtimes[] = {"libcudart.so.13", "libcudart.so.12"};
  for (size_t i = 0; !found && i < sizeof runtimes / sizeof *runtimes; ++i) {
    void* library = dlopen(runtimes[i], RTLD_NOLOAD | RTLD_LAZY);
    if (library) found = dlsym(library, name);
  }
  if (!found) abort();
  return found;
}

static int call(const char* name, void* what) {
  atomic_fetch_add(&count, 1);
  return ((wait_for)real(name))(what);
}

int cudaStreamSynchronize(void* stream) { return call("cudaStreamSynchronize", stream); }
int cudaEventSynchronize(void* event) { return call("cudaEventSynchronize", event); }
int cudaDeviceSynchronize(void) { return call("cudaDeviceSynchronize", NULL); }
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  atomic_fetch_add(&count, 1);
  return ((copy)real("cudaMemcpy"))(to, from, bytes, kind);
}
