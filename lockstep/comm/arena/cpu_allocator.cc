#include "lockstep/comm/arena/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>

#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm::arena {
namespace {

/// Higher than libtorch's own priority (0), whose static initializers may run after install_arena().
constexpr std::uint8_t kAllocatorPriority = 10;

void free_block(void* block) { Arena::this_process().free(block); }

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    try {
      void* block = Arena::this_process().allocate(size);
      return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
    } catch (const ArenaFull& full) {
      throw TensorOutOfMemory({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, full.what(), full.hint());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

std::mutex mutex;  // guards previous_allocator
c10::Allocator* previous_allocator = nullptr;

ArenaAllocator& arena_allocator() {
  // Never destroyed: tensors in static objects are freed through it after main().
  static auto* allocator = new ArenaAllocator;
  return *allocator;
}

}  // namespace

void install_arena() {
  const std::lock_guard lock(mutex);
  if (previous_allocator) return;
  Arena::this_process();
  previous_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&arena_allocator(), kAllocatorPriority);
}

void uninstall_arena() {
  const std::lock_guard lock(mutex);
  if (!previous_allocator) return;
  c10::SetCPUAllocator(previous_allocator, kAllocatorPriority);
  previous_allocator = nullptr;
}

}  // namespace lockstep::comm::arena
