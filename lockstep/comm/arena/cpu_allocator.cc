#include "lockstep/comm/arena/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>

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

}  // namespace

void install_arena() {
  // Never destroyed: tensors in static objects are freed through it after main().
  static auto* const allocator = new ArenaAllocator;
  Arena::this_process();
  if (c10::GetCPUAllocator() != allocator) c10::SetCPUAllocator(allocator, kAllocatorPriority);
}

}  // namespace lockstep::comm::arena
