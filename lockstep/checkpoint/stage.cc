#include "lockstep/checkpoint/stage.h"

#include <sys/mman.h>
#include <torch/types.h>

#include <cerrno>
#include <cstring>

namespace lockstep::checkpoint {
namespace {

constexpr std::size_t kAlignment = 64;

bool can_be_saved(const at::Tensor& tensor) { return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() && !tensor.is_meta(); }

std::size_t room_for(const at::Tensor& tensor) { return (tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment; }

at::Tensor copied_to(char* memory, const at::Tensor& tensor) {
  at::Tensor copy = torch::from_blob(memory, tensor.sizes(), torch::TensorOptions(tensor.scalar_type()));
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    if (tensor.nbytes() > 0) std::memcpy(memory, tensor.const_data_ptr(), tensor.nbytes());  // past the caches when it is much
    return copy;
  }
  return copy.copy_(tensor.detach());
}

}  // namespace

void Stage::Unmap::operator()(char* memory) const { ::munmap(memory, num_bytes); }

void Stage::reserve(std::size_t num_bytes) {
  if (num_bytes <= memory_.get_deleter().num_bytes) return;
  memory_.reset();
  void* const mapped = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    memory_ = {nullptr, Unmap()};
    throw base::SystemError("cannot keep a copy of the " + std::to_string(num_bytes) + " bytes to save", errno);
  }
  ::madvise(mapped, num_bytes, MADV_HUGEPAGE);  // a wish
  memory_ = {static_cast<char*>(mapped), Unmap{num_bytes}};
}

Parts Stage::copied(const Parts& parts) {
  const torch::NoGradGuard no_grad;
  std::size_t num_bytes = kAlignment;
  for (const auto& [part, state] : parts)
    for (const auto& [name, value] : state)
      if (const auto* const tensor = std::get_if<at::Tensor>(&value); tensor && can_be_saved(*tensor)) num_bytes += room_for(*tensor);
  reserve(num_bytes);
  Parts copy = parts;
  char* memory = memory_.get();
  for (auto& [part, state] : copy)
    for (auto& [name, value] : state) {
      auto* const tensor = std::get_if<at::Tensor>(&value);
      if (!tensor || !can_be_saved(*tensor)) continue;
      const at::Tensor original = *tensor;
      *tensor = copied_to(memory, original);
      memory += room_for(original);
    }
  return copy;
}

}  // namespace lockstep::checkpoint
