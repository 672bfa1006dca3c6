#include "lockstep/comm/arena/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <mutex>

#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {
namespace {

/// Above libtorch's own (0), whose static initializers may run later than install_arena().
constexpr std::uint8_t kPriority = 10;

void release(void* block) { Arena::process().free(block); }

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    try {
      void* block = Arena::process().allocate(size);
      return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
    } catch (const ArenaFull& full) {
      C10_THROW_ERROR(OutOfMemoryError, full.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

std::mutex mutex;  // guards before
c10::Allocator* before = nullptr;

ArenaAllocator& the_allocator() {
  static auto* allocator = new ArenaAllocator;  // tensors in static objects are freed through it after main()
  return *allocator;
}

}  // namespace

void install_arena() {
  const std::lock_guard lock(mutex);
  if (before) return;
  Arena::process();
  before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&the_allocator(), kPriority);
}

void uninstall_arena() {
  const std::lock_guard lock(mutex);
  if (!before) return;
  c10::SetCPUAllocator(before, kPriority);
  before = nullptr;
}

bool arena_installed() {
  const std::lock_guard lock(mutex);
  return before != nullptr;
}

}  // namespace lockstep::comm
