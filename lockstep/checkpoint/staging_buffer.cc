#include "lockstep/checkpoint/staging_buffer.h"

#include <sys/mman.h>
#include <torch/types.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cerrno>
#include <cstring>

namespace lockstep::checkpoint {
namespace {

constexpr std::size_t kAlignment = 64;

bool is_saveable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() && !tensor.is_meta();
}

std::size_t padded_bytes(const at::Tensor& tensor) {
  return (tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
}

/// A memcpy() to memory that is not read soon. Its stores bypass the caches, so that the data of the next step stays in
/// cache and `to` is not read. It copies four pages at a time, because a single stream does not use all memory banks;
/// the C library does the same, but only above a few hundred MB. `to` must be aligned to kAlignment.
void copy_nontemporal(char* to, const char* from, std::size_t num_bytes) {
  std::size_t done = 0;
#ifdef __SSE2__
  constexpr std::size_t kPage = 4096, kPages = 4;
  for (; done + kPages * kPage <= num_bytes; done += kPages * kPage)
    for (std::size_t cache_line = 0; cache_line < kPage; cache_line += kAlignment)
      for (std::size_t page = 0; page < kPages; ++page) {
        const auto* const source = reinterpret_cast<const __m128i*>(from + done + page * kPage + cache_line);
        auto* const target = reinterpret_cast<__m128i*>(to + done + page * kPage + cache_line);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
                      d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
      }
  _mm_sfence();
#endif
  std::memcpy(to + done, from + done, num_bytes - done);
}

at::Tensor copy_tensor(char* memory, const at::Tensor& tensor) {
  at::Tensor copy = torch::from_blob(memory, tensor.sizes(), torch::TensorOptions(tensor.scalar_type()));
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    if (tensor.nbytes() > 0)
      copy_nontemporal(memory, static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    return copy;
  }
  return copy.copy_(tensor.detach());
}

}  // namespace

void StagingBuffer::Unmapper::operator()(char* memory) const { ::munmap(memory, num_bytes); }

void StagingBuffer::reserve(std::size_t num_bytes) {
  if (num_bytes <= memory_.get_deleter().num_bytes) return;
  memory_.reset();
  void* const mapped = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    memory_ = {nullptr, Unmapper()};
    throw base::SystemError("cannot allocate " + std::to_string(num_bytes) + " bytes for a copy of the checkpoint",
                            errno);
  }
  ::madvise(mapped, num_bytes, MADV_HUGEPAGE);  // best effort
  memory_ = {static_cast<char*>(mapped), Unmapper{num_bytes}};
}

CheckpointParts StagingBuffer::copy(const CheckpointParts& parts) {
  const torch::NoGradGuard no_grad;
  std::size_t num_bytes = kAlignment;
  for (const auto& [part, state] : parts)
    for (const auto& [name, value] : state)
      if (const auto* const tensor = std::get_if<at::Tensor>(&value); tensor && is_saveable(*tensor))
        num_bytes += padded_bytes(*tensor);
  reserve(num_bytes);
  CheckpointParts copy = parts;
  char* memory = memory_.get();
  for (auto& [part, state] : copy)
    for (auto& [name, value] : state) {
      auto* const tensor = std::get_if<at::Tensor>(&value);
      if (!tensor || !is_saveable(*tensor)) continue;
      const at::Tensor original = *tensor;
      *tensor = copy_tensor(memory, original);
      memory += padded_bytes(original);
    }
  return copy;
}

}  // namespace lockstep::checkpoint
